#!/bin/sh
# go-openai 1.43.0: behind a heartbeat a server's error is read as "unexpected end of JSON input".
#
# Guess before: a comment in a stream (`: waiting`) is read over, and an error that the server sends later (`data:
# {"error": ...}`) is an APIError with the server's sentence. The client collects each line that is not data as a part
# of an error, comments and `event:` lines too, and does not empty that collection at the next chunk. So the sentence
# of the error stands behind the comments, is no JSON with them, and is lost: a caller cannot tell "overloaded" from a
# broken stream. One comment anywhere before suffices. Each line that is not data also counts until the next chunk,
# the empty one behind a comment too: at the 151st comment in a row the stream ends with "too many empty messages",
# unless `EmptyMessagesLimit` is raised.
# Orca sends a comment every ten seconds while a stream waits: for such a client `X-Stream-Comments: off` keeps
# errors.
#
# Seen with: github.com/sashabaranov/go-openai 1.43.0, Go 1.26. Prints what the client reads, and fails when that
# changes. Go builds for some minutes on a slow machine, where its cache has no net/http yet.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export GOPATH="$folder/go" GOFLAGS="-modcacherw -mod=mod"
cat > read.go <<'GO'
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"

	"github.com/sashabaranov/go-openai"
)

const (
	chunk   = `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":"a"}}]}` + "\n\n"
	failure = `data: {"error":{"message":"overloaded","type":"server_error","code":"server_error"}}` + "\n\n"
	comment = ": waiting\n\n"
	end     = "data: [DONE]\n\n"
)

// read returns the text that the client gives out for this stream, and the error behind it.
func read(stream string) (string, error) {
	server := httptest.NewServer(http.HandlerFunc(func(answer http.ResponseWriter, _ *http.Request) {
		answer.Header().Set("Content-Type", "text/event-stream")
		answer.Write([]byte(stream))
	}))
	defer server.Close()
	settings := openai.DefaultConfig("any")
	settings.BaseURL = server.URL
	client := openai.NewClientWithConfig(settings)
	chunks, err := client.CreateChatCompletionStream(context.Background(), openai.ChatCompletionRequest{Model: "m"})
	if err != nil {
		return "", err
	}
	defer chunks.Close()
	text := ""
	for {
		one, err := chunks.Recv()
		if err != nil {
			return text, err
		}
		text += one.Choices[0].Delta.Content
	}
}

func main() {
	const lost, many = "unexpected end of JSON input", "stream has sent too many empty messages"
	for _, row := range []struct {
		name, stream, text, err string
		api                     bool
	}{
		{"no comment", chunk + end, "a", "EOF", false},
		{"a comment", comment + chunk + comment + chunk + end, "aa", "EOF", false},
		{"an error", chunk + failure + end, "a", "error, overloaded", true},
		{"a comment and an error", chunk + comment + failure + end, "a", lost, false},
		{"a comment, two chunks and an error", comment + chunk + chunk + failure + end, "aa", lost, false},
		{"an error with a name", chunk + "event: error\n" + failure + end, "a", lost, false},
		{"150 comments", strings.Repeat(comment, 150) + chunk + end, "a", "EOF", false},
		{"151 comments", strings.Repeat(comment, 151) + chunk + end, "", many, false},
	} {
		text, err := read(row.stream)
		var api *openai.APIError
		fmt.Printf("%s: %q, then %q, an APIError: %t\n", row.name, text, err, errors.As(err, &api))
		if text != row.text || err.Error() != row.err || errors.As(err, &api) != row.api {
			fmt.Println("expected:", row.text, row.err, row.api)
			os.Exit(1)
		}
	}
}
GO
go mod init read 2> log
go get github.com/sashabaranov/go-openai@v1.43.0 2> log || { cat log; exit 1; }
go build -o read . 2> log || { cat log; exit 1; }
./read
