// Runs the cases of gRPC's interop test descriptions that apply to orca.v1, with grpc-go.
//
//	client [-tls FOLDER] -compressed CODE -beyond CODE ADDRESS
//
// The server's engine is played by tests/interop/engine.py. Each case prints one line; a failure ends with status 1.
package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	reflection "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"orca.serving/examples/go/orcav1"
)

const (
	largeRequest  = 271_828 // bytes, as in the descriptions
	largeResponse = 314_159
	tooLarge      = 9 << 19 // 4.5 MB: above the limit of a message
	missing       = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
)

// suite is one connection to the server, and what is expected of it.
type suite struct {
	address    string
	tls        *tls.Config // nil: plaintext
	compressed string      // the status of a request that is compressed with gzip, such as UNIMPLEMENTED
	beyond     string      // the status of a request that is larger than the limit
	connection *grpc.ClientConn
	orca       orcav1.OrcaClient
}

func main() {
	folder := flag.String("tls", "", "folder with ca.crt, tls.crt and tls.key; without it plaintext")
	compressed := flag.String("compressed", "UNIMPLEMENTED", "status of a request that is compressed with gzip")
	beyond := flag.String("beyond", "RESOURCE_EXHAUSTED", "status of a request that is larger than the limit")
	flag.Parse()
	s := &suite{address: flag.Arg(0), compressed: *compressed, beyond: *beyond}
	transport := insecure.NewCredentials()
	if *folder != "" {
		s.tls = must(transportSecurity(*folder))
		transport = credentials.NewTLS(s.tls)
	}
	s.connection = must(grpc.NewClient(s.address, grpc.WithTransportCredentials(transport)))
	defer s.connection.Close()
	s.orca = orcav1.NewOrcaClient(s.connection)
	failed := false
	for _, test := range []struct {
		name string
		run  func(context.Context) error
	}{
		{"empty_unary", s.emptyUnary},
		{"large_unary", s.largeUnary},
		{"large_unary_beyond_the_limit", s.beyondTheLimit},
		{"client_compressed_unary", s.clientCompressedUnary},
		{"server_streaming", s.serverStreaming},
		{"ping_pong", s.pingPong},
		{"empty_stream", s.emptyStream},
		{"custom_metadata", s.customMetadata},
		{"status_code_and_message", s.statusCodeAndMessage},
		{"special_status_message", s.specialStatusMessage},
		{"unimplemented_method", s.unimplementedMethod},
		{"unimplemented_service", s.unimplementedService},
		{"cancel_after_begin", s.cancelAfterBegin},
		{"cancel_after_first_response", s.cancelAfterFirstResponse},
		{"timeout_on_sleeping_server", s.timeoutOnSleepingServer},
		{"concurrent_streams", s.concurrentStreams},
		{"pings", s.pings},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		if err := test.run(ctx); err != nil {
			failed = true
			fmt.Printf("FAILED %s: %q\n", test.name, err)
		} else {
			fmt.Println("ok", test.name)
		}
		cancel()
	}
	if failed {
		os.Exit(1)
	}
}

func (s *suite) emptyUnary(ctx context.Context) error {
	model, err := s.orca.GetModel(ctx, &orcav1.GetModelRequest{})
	if err != nil {
		return err
	}
	return expect(model.GetVocabSize() > 0, "a model without a vocabulary: %v", model)
}

// largeUnary sends a large prompt, and asks for a large answer.
func (s *suite) largeUnary(ctx context.Context) error {
	answer, err := s.orca.GenerateText(ctx, request("answer", largeRequest, 3))
	if err != nil {
		return err
	}
	if err := expect(len(answer.GetTokenIds()) == 3, "%d tokens", len(answer.GetTokenIds())); err != nil {
		return err
	}
	scored := request("answer", 1500, 3)
	scored.PromptLogprobs, scored.TopLogprobs = true, 20
	answer, err = s.orca.GenerateText(ctx, scored)
	if err != nil {
		return err
	}
	return expect(
		len(answer.GetPrompt()) == 1500 && proto.Size(answer) >= largeResponse,
		"%d tokens of the prompt in %d bytes", len(answer.GetPrompt()), proto.Size(answer),
	)
}

func (s *suite) beyondTheLimit(ctx context.Context) error {
	_, err := s.orca.GenerateText(ctx, request("answer", tooLarge, 3))
	return expectCode(err, codeOf(s.beyond))
}

// clientCompressedUnary expects the code that the door has for it, and that other answers tell which encodings it takes.
// The protocol wants the refusal itself to tell them; C-core's has no initial metadata, and so does not.
func (s *suite) clientCompressedUnary(ctx context.Context) error {
	var header metadata.MD
	if _, err := s.orca.GetModel(ctx, &orcav1.GetModelRequest{}, grpc.Header(&header)); err != nil {
		return err
	}
	_, err := s.orca.GetModel(ctx, &orcav1.GetModelRequest{}, grpc.UseCompressor(gzip.Name))
	if err := expectCode(err, codeOf(s.compressed)); err != nil {
		return err
	}
	accepted := strings.Join(header.Get("grpc-accept-encoding"), ",")
	return expect(
		strings.Contains(accepted, "identity") && strings.Contains(accepted, "gzip") == (err == nil),
		"grpc-accept-encoding: %q, but %s", accepted, status.Code(err),
	)
}

func (s *suite) serverStreaming(ctx context.Context) error {
	responses, err := s.orca.Generate(ctx, request("answer", 3, 60))
	if err != nil {
		return err
	}
	return read(responses, 3, 60)
}

// pingPong asks one question after the answer to the one before.
func (s *suite) pingPong(ctx context.Context) error {
	stream, err := reflection.NewServerReflectionClient(s.connection).ServerReflectionInfo(ctx)
	if err != nil {
		return err
	}
	for _, symbol := range []string{"orca.v1.Orca", "orca.v1.Token", "grpc.health.v1.Health", "orca.v1.Orca"} {
		question := &reflection.ServerReflectionRequest{
			MessageRequest: &reflection.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: symbol},
		}
		if err := stream.Send(question); err != nil {
			return err
		}
		answer, err := stream.Recv()
		if err != nil {
			return err
		}
		if len(answer.GetFileDescriptorResponse().GetFileDescriptorProto()) == 0 {
			return fmt.Errorf("no file for %s: %v", symbol, answer)
		}
	}
	return endOf(stream)
}

func (s *suite) emptyStream(ctx context.Context) error {
	stream, err := reflection.NewServerReflectionClient(s.connection).ServerReflectionInfo(ctx)
	if err != nil {
		return err
	}
	return endOf(stream)
}

// customMetadata reads an error's details, which are binary trailing metadata.
func (s *suite) customMetadata(ctx context.Context) error {
	_, err := s.orca.GenerateText(ctx, &orcav1.GenerateRequest{MaxNewTokens: 1})
	if err := expectCode(err, codes.InvalidArgument); err != nil {
		return err
	}
	var reason, field string
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			reason = detail.GetDomain() + " " + detail.GetReason()
		case *errdetails.BadRequest:
			field = detail.GetFieldViolations()[0].GetField()
		}
	}
	return expect(reason == "orca.serving INVALID_FIELD" && field == "prompt", "reason %q, field %q", reason, field)
}

func (s *suite) statusCodeAndMessage(ctx context.Context) error {
	_, err := s.orca.Cancel(ctx, &orcav1.CancelRequest{RequestId: "nobody"})
	if err := expectCode(err, codes.NotFound); err != nil {
		return err
	}
	return expect(strings.Contains(status.Convert(err).Message(), "nobody"), "%v", err)
}

// specialStatusMessage compares the percent-encoded sentence with the same one in the binary details.
func (s *suite) specialStatusMessage(ctx context.Context) error {
	strange := request("answer", 3, 3)
	strange.Model = missing
	var trailer metadata.MD
	_, err := s.orca.GenerateText(ctx, strange, grpc.Trailer(&trailer))
	if err := expectCode(err, codes.NotFound); err != nil {
		return err
	}
	message, whole := status.Convert(err).Message(), status.Convert(err).Proto().GetMessage()
	return expect(
		message == whole && strings.Contains(message, "☺") && strings.Contains(message, "😈"), "%q, %q", message, whole)
}

func (s *suite) unimplementedMethod(ctx context.Context) error {
	return expectCode(s.invoke(ctx, "/orca.v1.Orca/UnimplementedCall"), codes.Unimplemented)
}

func (s *suite) unimplementedService(ctx context.Context) error {
	return expectCode(s.invoke(ctx, "/orca.v1.UnimplementedService/UnimplementedCall"), codes.Unimplemented)
}

func (s *suite) invoke(ctx context.Context, path string) error {
	return s.connection.Invoke(ctx, path, &orcav1.GetModelRequest{}, &orcav1.GetModelResponse{})
}

func (s *suite) cancelAfterBegin(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	responses, err := s.orca.Generate(ctx, request("silent", 3, 3))
	if err != nil {
		return err
	}
	cancel()
	return expectCode(read(responses, 3, 3), codes.Canceled)
}

func (s *suite) cancelAfterFirstResponse(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	responses, err := s.orca.Generate(ctx, request("silent", 3, 3))
	if err != nil {
		return err
	}
	if _, err := responses.Recv(); err != nil {
		return err
	}
	cancel()
	return expectCode(read(responses, 3, 3), codes.Canceled)
}

func (s *suite) timeoutOnSleepingServer(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	responses, err := s.orca.Generate(ctx, request("silent", 3, 3))
	if err != nil {
		return expectCode(err, codes.DeadlineExceeded)
	}
	return expectCode(read(responses, 3, 3), codes.DeadlineExceeded)
}

// concurrentStreams reads 100 streams of one connection. Each has other tokens.
func (s *suite) concurrentStreams(ctx context.Context) error {
	var group sync.WaitGroup
	failures := make([]error, 100)
	for n := range failures {
		group.Go(func() {
			responses, err := s.orca.Generate(ctx, request("answer", n+1, 40))
			if err == nil {
				err = read(responses, n+1, 40)
			}
			failures[n] = err
		})
	}
	group.Wait()
	return errors.Join(failures...)
}

// pings reads a silent stream for 5 s with a ping every second. grpc-go itself pings every 10 s at most, so the call is
// made by Go's HTTP/2, which pings when nothing has come.
func (s *suite) pings(ctx context.Context) error {
	transport := &http2.Transport{ReadIdleTimeout: time.Second, TLSClientConfig: s.tls, DisableCompression: true}
	scheme := "https"
	if s.tls == nil {
		scheme, transport.AllowHTTP = "http", true
		transport.DialTLSContext = func(ctx context.Context, network, address string, _ *tls.Config) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		}
	}
	defer transport.CloseIdleConnections()
	message := must(proto.Marshal(request("silent", 3, 3)))
	body := string([]byte{0, 0, 0, byte(len(message) >> 8), byte(len(message))}) + string(message)
	url := scheme + "://" + s.address + orcav1.Orca_Generate_FullMethodName
	call := must(http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body)))
	call.Header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"}, "Grpc-Timeout": {"5S"}}
	answer, err := transport.RoundTrip(call)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if _, err := io.Copy(io.Discard, answer.Body); err != nil {
		return err
	}
	code := answer.Header.Get("Grpc-Status") + answer.Trailer.Get("Grpc-Status")
	return expect(code == strconv.Itoa(int(codes.DeadlineExceeded)), "grpc-status %q", code)
}

// request asks for tokens after a prompt of so many. The played engine reads in the id's first word what to do.
func request(word string, prompt, tokens int) *orcav1.GenerateRequest {
	ids := make([]uint32, prompt)
	for n := range ids {
		ids[n] = 7
	}
	return &orcav1.GenerateRequest{
		RequestId:    word + "-" + rand.Text(),
		Prompt:       &orcav1.GenerateRequest_TokenIds{TokenIds: &orcav1.TokenIds{Ids: ids}},
		MaxNewTokens: uint32(tokens),
	}
}

// read checks a whole stream of an answer: `accepted` first, each index once and in order, `finished` last.
func read(responses grpc.ServerStreamingClient[orcav1.GenerateResponse], prompt, tokens int) error {
	next, finished := 0, false
	for messages := 0; ; messages++ {
		response, err := responses.Recv()
		if errors.Is(err, io.EOF) {
			return expect(next == tokens && finished, "%d tokens, finished: %t", next, finished)
		}
		if err != nil {
			return err
		}
		if finished || (response.GetAccepted() != nil) != (messages == 0) {
			return fmt.Errorf("message %d is out of order: %v", messages, response)
		}
		for _, token := range response.GetTokens() {
			if int(token.GetIndex()) != next || int(token.GetTokenId()) != expected(prompt, next) {
				return fmt.Errorf("token %d instead: %v", next, token)
			}
			next++
		}
		finished = response.GetFinished() != nil
	}
}

// expected is the token that the played engine makes at an index.
func expected(prompt, index int) int { return 1 + (prompt*31+index)%500 }

// endOf says that there are no more questions, and expects no more answers.
func endOf(stream reflection.ServerReflection_ServerReflectionInfoClient) error {
	if err := stream.CloseSend(); err != nil {
		return err
	}
	answer, err := stream.Recv()
	return expect(errors.Is(err, io.EOF), "%v, %v", answer, err)
}

func expect(holds bool, sentence string, values ...any) error {
	if holds {
		return nil
	}
	return fmt.Errorf(sentence, values...)
}

// codeOf reads a status as the protocol spells it.
func codeOf(name string) (code codes.Code) {
	if err := code.UnmarshalJSON([]byte(strconv.Quote(name))); err != nil {
		panic(err)
	}
	return code
}

func expectCode(err error, code codes.Code) error {
	return expect(status.Code(err) == code, "%s, not %s: %v", status.Code(err), code, err)
}

func transportSecurity(folder string) (*tls.Config, error) {
	authority, err := os.ReadFile(filepath.Join(folder, "ca.crt"))
	if err != nil {
		return nil, err
	}
	own, err := tls.LoadX509KeyPair(filepath.Join(folder, "tls.crt"), filepath.Join(folder, "tls.key"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	return &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{own}, NextProtos: []string{"h2"}}, nil
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}
