package interop;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import io.grpc.CallOptions;
import io.grpc.ChannelCredentials;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.reflection.v1.ServerReflectionGrpc;
import io.grpc.reflection.v1.ServerReflectionRequest;
import io.grpc.reflection.v1.ServerReflectionResponse;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.StreamObserver;
import java.io.File;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import serving.orca.v1.CancelRequest;
import serving.orca.v1.GenerateRequest;
import serving.orca.v1.GenerateResponse;
import serving.orca.v1.GenerateTextResponse;
import serving.orca.v1.GetModelRequest;
import serving.orca.v1.GetModelResponse;
import serving.orca.v1.OrcaGrpc;
import serving.orca.v1.OrcaGrpc.OrcaBlockingStub;
import serving.orca.v1.Token;
import serving.orca.v1.TokenIds;

/**
 * Runs the cases of gRPC's interop test descriptions that apply to orca.v1, with grpc-java.
 *
 * <pre>Client [-tls FOLDER] -compressed CODE -beyond CODE ADDRESS</pre>
 *
 * The server's engine is played by tests/interop/engine.py. Each case prints one line; a failure ends with status 1.
 */
public final class Client {
  private static final int LARGE_REQUEST = 271_828; // bytes, as in the descriptions
  private static final int LARGE_RESPONSE = 314_159;
  private static final int TOO_LARGE = 9 << 19; // 4.5 MB: above the limit of a message
  private static final String MISSING = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP \uD83D\uDE08\t\n";

  /** A case. It throws when the server does something else than described. */
  private interface Case {
    void run() throws Exception;
  }

  private final ManagedChannel channel;
  private final Status.Code compressed; // the status of a request that is compressed with gzip
  private final Status.Code beyond; // the status of a request that is larger than the limit

  private Client(ManagedChannel channel, Status.Code compressed, Status.Code beyond) {
    this.channel = channel;
    this.compressed = compressed;
    this.beyond = beyond;
  }

  public static void main(String[] arguments) throws Exception {
    Map<String, String> options = new LinkedHashMap<>();
    for (int n = 0; n + 1 < arguments.length; n += 2) {
      options.put(arguments[n], arguments[n + 1]);
    }
    String address = arguments[arguments.length - 1];
    ManagedChannel channel = Grpc.newChannelBuilder(address, credentials(options.get("-tls"))).build();
    Status.Code compressed = Status.Code.valueOf(options.getOrDefault("-compressed", "UNIMPLEMENTED"));
    Status.Code beyond = Status.Code.valueOf(options.getOrDefault("-beyond", "RESOURCE_EXHAUSTED"));
    boolean passed = new Client(channel, compressed, beyond).passed();
    channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    System.exit(passed ? 0 : 1);
  }

  private static ChannelCredentials credentials(String folder) throws IOException {
    if (folder == null) {
      return InsecureChannelCredentials.create();
    }
    return TlsChannelCredentials.newBuilder()
        .trustManager(new File(folder, "ca.crt"))
        .keyManager(new File(folder, "tls.crt"), new File(folder, "tls.key"))
        .build();
  }

  private boolean passed() {
    Map<String, Case> cases = new LinkedHashMap<>();
    cases.put("empty_unary", this::emptyUnary);
    cases.put("large_unary", this::largeUnary);
    cases.put("large_unary_beyond_the_limit", this::beyondTheLimit);
    cases.put("client_compressed_unary", this::clientCompressedUnary);
    cases.put("server_streaming", this::serverStreaming);
    cases.put("ping_pong", this::pingPong);
    cases.put("empty_stream", this::emptyStream);
    cases.put("custom_metadata", this::customMetadata);
    cases.put("status_code_and_message", this::statusCodeAndMessage);
    cases.put("special_status_message", this::specialStatusMessage);
    cases.put("unimplemented_method", () -> unimplemented("orca.v1.Orca"));
    cases.put("unimplemented_service", () -> unimplemented("orca.v1.UnimplementedService"));
    cases.put("cancel_after_begin", this::cancelAfterBegin);
    cases.put("cancel_after_first_response", this::cancelAfterFirstResponse);
    cases.put("timeout_on_sleeping_server", this::timeoutOnSleepingServer);
    cases.put("concurrent_streams", this::concurrentStreams);
    PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    boolean passed = true;
    for (Map.Entry<String, Case> each : cases.entrySet()) {
      try {
        each.getValue().run();
        out.println("ok " + each.getKey());
      } catch (Exception | AssertionError error) {
        passed = false;
        out.println("FAILED " + each.getKey() + ": " + error.toString().replace("\n", "\\n"));
      }
    }
    return passed;
  }

  private void emptyUnary() {
    expect(orca().getModel(GetModelRequest.getDefaultInstance()).getVocabSize() > 0, "no vocabulary");
  }

  /** Sends a large prompt, and asks for a large answer. */
  private void largeUnary() {
    int tokens = orca().generateText(request("answer", LARGE_REQUEST, 3).build()).getTokenIdsCount();
    expect(tokens == 3, tokens + " tokens");
    GenerateRequest.Builder scored = request("answer", 1500, 3).setPromptLogprobs(true).setTopLogprobs(20);
    GenerateTextResponse answer = orca().generateText(scored.build());
    expect(answer.getPromptCount() == 1500, answer.getPromptCount() + " tokens of the prompt");
    expect(answer.getSerializedSize() >= LARGE_RESPONSE, answer.getSerializedSize() + " bytes");
  }

  private void beyondTheLimit() {
    ends(beyond, () -> orca().generateText(request("answer", TOO_LARGE, 3).build()));
  }

  private void clientCompressedUnary() {
    ends(compressed, () -> orca().withCompression("gzip").getModel(GetModelRequest.getDefaultInstance()));
  }

  private void serverStreaming() {
    read(orca().generate(request("answer", 3, 60).build()), 3, 60);
  }

  /** Asks one question after the answer to the one before. */
  private void pingPong() throws InterruptedException {
    Answers answers = new Answers();
    StreamObserver<ServerReflectionRequest> questions = reflect(answers);
    for (String symbol : List.of("orca.v1.Orca", "orca.v1.Token", "grpc.health.v1.Health", "orca.v1.Orca")) {
      questions.onNext(ServerReflectionRequest.newBuilder().setFileContainingSymbol(symbol).build());
      Object answer = answers.next();
      boolean file = answer instanceof ServerReflectionResponse response && response.hasFileDescriptorResponse();
      expect(file, symbol + ": " + answer);
    }
    questions.onCompleted();
    answers.expectEnd();
  }

  private void emptyStream() throws InterruptedException {
    Answers answers = new Answers();
    reflect(answers).onCompleted();
    answers.expectEnd();
  }

  private StreamObserver<ServerReflectionRequest> reflect(Answers answers) {
    return ServerReflectionGrpc.newStub(channel).withDeadlineAfter(20, TimeUnit.SECONDS).serverReflectionInfo(answers);
  }

  /** Reads an error's details, which are binary trailing metadata. */
  private void customMetadata() throws InvalidProtocolBufferException {
    GenerateRequest bad = GenerateRequest.newBuilder().setMaxNewTokens(1).build();
    StatusRuntimeException error = ends(Status.Code.INVALID_ARGUMENT, () -> orca().generateText(bad));
    String reason = "";
    String field = "";
    for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
      if (detail.is(ErrorInfo.class)) {
        ErrorInfo info = detail.unpack(ErrorInfo.class);
        reason = info.getDomain() + " " + info.getReason();
      } else if (detail.is(BadRequest.class)) {
        field = detail.unpack(BadRequest.class).getFieldViolations(0).getField();
      }
    }
    expect(reason.equals("orca.serving INVALID_FIELD") && field.equals("prompt"), reason + ", " + field);
  }

  private void statusCodeAndMessage() {
    CancelRequest nobody = CancelRequest.newBuilder().setRequestId("nobody").build();
    StatusRuntimeException error = ends(Status.Code.NOT_FOUND, () -> orca().cancel(nobody));
    expect(error.getStatus().getDescription().contains("nobody"), error.getMessage());
  }

  /** Compares the percent-encoded sentence with the same one in the binary details. */
  private void specialStatusMessage() {
    GenerateRequest strange = request("answer", 3, 3).setModel(MISSING).build();
    StatusRuntimeException error = ends(Status.Code.NOT_FOUND, () -> orca().generateText(strange));
    String message = error.getStatus().getDescription();
    expect(message.equals(StatusProto.fromThrowable(error).getMessage()), message);
    expect(message.contains("☺") && message.contains("\uD83D\uDE08"), message);
  }

  private void unimplemented(String service) {
    String name = MethodDescriptor.generateFullMethodName(service, "UnimplementedCall");
    MethodDescriptor<GetModelRequest, GetModelResponse> method =
        OrcaGrpc.getGetModelMethod().toBuilder().setFullMethodName(name).build();
    CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(20, TimeUnit.SECONDS);
    GetModelRequest nothing = GetModelRequest.getDefaultInstance();
    ends(Status.Code.UNIMPLEMENTED, () -> ClientCalls.blockingUnaryCall(channel, method, options, nothing));
  }

  private void cancelAfterBegin() {
    Context.CancellableContext context = Context.current().withCancellation();
    Iterator<GenerateResponse> responses = silent(context, 20_000);
    context.cancel(null);
    ends(Status.Code.CANCELLED, () -> read(responses, 3, 3));
  }

  private void cancelAfterFirstResponse() {
    Context.CancellableContext context = Context.current().withCancellation();
    Iterator<GenerateResponse> responses = silent(context, 20_000);
    responses.next();
    context.cancel(null);
    ends(Status.Code.CANCELLED, () -> read(responses, 3, 3));
  }

  private void timeoutOnSleepingServer() {
    try (Context.CancellableContext context = Context.current().withCancellation()) {
      ends(Status.Code.DEADLINE_EXCEEDED, () -> read(silent(context, 300), 3, 3));
    }
  }

  /** Begins a stream that the played engine leaves without a token. */
  private Iterator<GenerateResponse> silent(Context context, long milliseconds) {
    OrcaBlockingStub stub = OrcaGrpc.newBlockingStub(channel).withDeadlineAfter(milliseconds, TimeUnit.MILLISECONDS);
    Context before = context.attach();
    try {
      return stub.generate(request("silent", 3, 3).build());
    } finally {
      context.detach(before);
    }
  }

  /** Reads 100 streams of one connection. Each has other tokens. */
  private void concurrentStreams() throws Exception {
    ExecutorService threads = Executors.newFixedThreadPool(100);
    try {
      List<Future<?>> streams = new ArrayList<>();
      for (int n = 1; n <= 100; n++) {
        int prompt = n;
        streams.add(
            threads.submit(() -> read(orca().generate(request("answer", prompt, 40).build()), prompt, 40)));
      }
      for (Future<?> stream : streams) {
        stream.get();
      }
    } finally {
      threads.shutdownNow();
    }
  }

  private OrcaBlockingStub orca() {
    return OrcaGrpc.newBlockingStub(channel).withDeadlineAfter(20, TimeUnit.SECONDS);
  }

  /** Asks for tokens after a prompt of so many. The played engine reads in the id's first word what to do. */
  private static GenerateRequest.Builder request(String word, int prompt, int tokens) {
    return GenerateRequest.newBuilder()
        .setRequestId(word + "-" + UUID.randomUUID())
        .setTokenIds(TokenIds.newBuilder().addAllIds(Collections.nCopies(prompt, 7)))
        .setMaxNewTokens(tokens);
  }

  /** Checks a whole stream of an answer: `accepted` first, each index once and in order, `finished` last. */
  private static void read(Iterator<GenerateResponse> responses, int prompt, int tokens) {
    int next = 0;
    boolean finished = false;
    for (int messages = 0; responses.hasNext(); messages++) {
      GenerateResponse response = responses.next();
      boolean inOrder = !finished && response.hasAccepted() == (messages == 0);
      expect(inOrder, "message " + messages + " is out of order");
      for (Token token : response.getTokensList()) {
        boolean right = token.getIndex() == next && token.getTokenId() == 1 + (prompt * 31 + next) % 500;
        expect(right, "token " + next + " instead: " + token);
        next++;
      }
      finished = response.hasFinished();
    }
    expect(next == tokens && finished, next + " tokens, finished: " + finished);
  }

  /** Runs a call that must end with a status. Returns its error; null for OK. */
  private static StatusRuntimeException ends(Status.Code code, Runnable call) {
    StatusRuntimeException error = null;
    try {
      call.run();
    } catch (StatusRuntimeException caught) {
      error = caught;
    }
    expect((error == null ? Status.Code.OK : error.getStatus().getCode()) == code, code + " instead: " + error);
    return error;
  }

  private static void expect(boolean holds, String sentence) {
    if (!holds) {
      throw new AssertionError(sentence);
    }
  }

  /** The answers of a stream in their order, then its end or its error. */
  private static final class Answers implements StreamObserver<ServerReflectionResponse> {
    private static final Object END = "the end";
    private final BlockingQueue<Object> received = new LinkedBlockingQueue<>();

    @Override
    public void onNext(ServerReflectionResponse answer) {
      received.add(answer);
    }

    @Override
    public void onError(Throwable error) {
      received.add(error);
    }

    @Override
    public void onCompleted() {
      received.add(END);
    }

    Object next() throws InterruptedException {
      return received.poll(20, TimeUnit.SECONDS);
    }

    void expectEnd() throws InterruptedException {
      Object answer = next();
      expect(answer == END, "no end: " + answer);
    }
  }
}
