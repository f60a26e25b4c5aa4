// Orca from Go, with code generated from its contract: one answer at once, then a stream that resumes by itself.
//
//	go run . [ADDRESS]
//
// generate.sh made the package orcav1 from protos/orca/v1/orca.proto.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"orca.serving/examples/go/orcav1"
)

func main() {
	address := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := orcav1.NewOrcaClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // the requests' deadline too
	defer cancel()

	answer, err := client.GenerateText(ctx, request("import os"))
	if err != nil {
		log.Fatal(explain(err))
	}
	fmt.Printf("%d tokens at once: %q\n", len(answer.GetTokenIds()), answer.GetText())

	if err := stream(ctx, client, request("class Queue:")); err != nil {
		log.Fatal(explain(err))
	}

	_, err = client.GenerateText(ctx, &orcav1.GenerateRequest{})
	fmt.Println("an error:", explain(err))
}

// request makes the id itself, so that sending it again does nothing twice.
func request(prompt string) *orcav1.GenerateRequest {
	seed := uint64(1)
	return &orcav1.GenerateRequest{
		RequestId:    "go-" + rand.Text(),
		Prompt:       &orcav1.GenerateRequest_Text{Text: prompt},
		MaxNewTokens: 16,
		Sampling:     &orcav1.Sampling{Temperature: 0.7, Seed: &seed},
		DetachGrace:  durationpb.New(30 * time.Second), // so long it lives on while no call reads it
	}
}

// stream prints a request's tokens as they come. When the connection breaks, it resumes after the last token seen.
func stream(ctx context.Context, client orcav1.OrcaClient, request *orcav1.GenerateRequest) error {
	responses, err := client.Generate(ctx, request)
	accepted, seen := false, uint32(0)
	for {
		var response *orcav1.GenerateResponse
		if err == nil {
			response, err = responses.Recv()
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case status.Code(err) == codes.Unavailable:
			time.Sleep(200 * time.Millisecond)
			if accepted {
				resume := &orcav1.ResumeRequest{RequestId: request.RequestId, FromIndex: seen}
				responses, err = client.Resume(ctx, resume)
			} else {
				responses, err = client.Generate(ctx, request)
			}
			continue
		case err != nil:
			return err
		}
		// A message holds what is there together: read all three.
		if response.GetAccepted() != nil {
			accepted = true
		}
		for _, token := range response.GetTokens() {
			fmt.Print(token.GetText())
			seen = token.GetIndex() + 1
		}
		if finished := response.GetFinished(); finished != nil {
			took := finished.GetTimings().GetFinished().AsDuration()
			fmt.Printf("%s\n%d tokens, %s, %s\n", finished.GetText(), finished.GetOutputTokens(), finished.GetReason(), took)
		}
	}
}

// explain adds the stable reason of Orca's errors to their sentence.
func explain(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return fmt.Sprintf("%s: %s", info.GetReason(), status.Convert(err).Message())
		}
	}
	return err.Error()
}
