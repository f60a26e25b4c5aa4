package example;

import com.google.protobuf.Duration;
import com.google.rpc.ErrorInfo;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.Iterator;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import serving.orca.v1.GenerateRequest;
import serving.orca.v1.GenerateResponse;
import serving.orca.v1.GenerateTextResponse;
import serving.orca.v1.OrcaGrpc;
import serving.orca.v1.OrcaGrpc.OrcaBlockingStub;
import serving.orca.v1.ResumeRequest;
import serving.orca.v1.Sampling;
import serving.orca.v1.Token;

/**
 * Orca from Java: one answer at once, then a stream that resumes by itself.
 *
 * <pre>mvn -q compile exec:java -Dexec.args=ADDRESS</pre>
 */
public final class Client {
  public static void main(String[] arguments) throws InterruptedException {
    String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:50051";
    ManagedChannel channel = Grpc.newChannelBuilder(address, InsecureChannelCredentials.create()).build();
    OrcaBlockingStub orca = OrcaGrpc.newBlockingStub(channel);
    try {
      GenerateTextResponse answer = withDeadline(orca).generateText(request("import os"));
      System.out.printf("%d tokens at once: %s%n", answer.getTokenIdsCount(), answer.getText().strip());

      stream(orca, request("class Queue:"));

      withDeadline(orca).generateText(GenerateRequest.getDefaultInstance());
    } catch (StatusRuntimeException error) {
      System.out.println("an error: " + explain(error));
    } finally {
      channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }
  }

  /** A call's deadline is the request's too. */
  private static OrcaBlockingStub withDeadline(OrcaBlockingStub orca) {
    return orca.withDeadlineAfter(60, TimeUnit.SECONDS);
  }

  /** Makes the id itself, so that sending the request again does nothing twice. */
  private static GenerateRequest request(String prompt) {
    return GenerateRequest.newBuilder()
        .setRequestId("java-" + UUID.randomUUID())
        .setText(prompt)
        .setMaxNewTokens(16)
        .setSampling(Sampling.newBuilder().setTemperature(0.7).setSeed(1))
        .setDetachGrace(Duration.newBuilder().setSeconds(30)) // so long it lives on while no call reads it
        .build();
  }

  /** Prints a request's tokens as they come. When the connection breaks, it resumes after the last token seen. */
  private static void stream(OrcaBlockingStub orca, GenerateRequest request) throws InterruptedException {
    boolean accepted = false;
    int seen = 0;
    while (true) {
      try {
        Iterator<GenerateResponse> responses;
        if (accepted) {
          ResumeRequest resume =
              ResumeRequest.newBuilder().setRequestId(request.getRequestId()).setFromIndex(seen).build();
          responses = withDeadline(orca).resume(resume);
        } else {
          responses = withDeadline(orca).generate(request);
        }
        while (responses.hasNext()) {
          GenerateResponse response = responses.next(); // holds what is there together: read all three
          accepted |= response.hasAccepted();
          for (Token token : response.getTokensList()) {
            System.out.print(token.getText());
            seen = token.getIndex() + 1;
          }
          if (response.hasFinished()) {
            System.out.println(response.getFinished().getText());
            System.out.printf("%d tokens, %s%n", seen, response.getFinished().getReason());
            return;
          }
        }
      } catch (StatusRuntimeException error) {
        if (error.getStatus().getCode() != Status.Code.UNAVAILABLE) {
          throw error;
        }
        Thread.sleep(200);
      }
    }
  }

  /** The stable reason of Orca's errors, before their sentence. */
  private static String explain(StatusRuntimeException error) {
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    if (status != null) {
      for (com.google.protobuf.Any detail : status.getDetailsList()) {
        try {
          if (detail.is(ErrorInfo.class)) {
            return detail.unpack(ErrorInfo.class).getReason() + ": " + status.getMessage();
          }
        } catch (com.google.protobuf.InvalidProtocolBufferException unreadable) {
          continue;
        }
      }
    }
    return error.getMessage();
  }
}
