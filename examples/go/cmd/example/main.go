// Everything that a service does with the engine, one command each.
//
//	example ADDRESS [generate [PROMPT [MAX_TOKENS]] | chat | cancel | deadline | refused | session]
//
// Without a command: all of them.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"triptych.dev/examples/go/triptych"
	pb "triptych.dev/gen/triptych/v1"
)

func request(prompt string, maxTokens uint32) *pb.GenerateRequest {
	return &pb.GenerateRequest{
		Prompt: &pb.GenerateRequest_Text{Text: prompt},
		SamplingParams: &pb.SamplingParams{
			MaxTokens: proto.Uint32(maxTokens),
			Seed:      proto.Uint64(1),
			IgnoreEos: proto.Bool(true),
		},
	}
}

func generate(ctx context.Context, client *triptych.Client, arguments []string) error {
	prompt, maxTokens := "Once upon a time", 32
	if len(arguments) > 0 {
		prompt = arguments[0]
	}
	if len(arguments) > 1 {
		var err error
		if maxTokens, err = strconv.Atoi(arguments[1]); err != nil {
			return err
		}
	}
	stream := client.Generate(ctx, request(prompt, uint32(maxTokens)))
	defer stream.Close()
	var usage *pb.Usage
	for {
		piece, err := stream.Recv()
		if err == io.EOF {
			fmt.Printf("\n[%d tokens]\n", usage.GetCompletionTokens())
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(piece.GetText())
		if piece.GetUsage() != nil {
			usage = piece.GetUsage()
		}
	}
}

func chat(ctx context.Context, client *triptych.Client, _ []string) error {
	stream := client.Chat(ctx, &pb.ChatRequest{
		Messages:       []*pb.ChatMessage{{Role: "user", Content: "Name three colours."}},
		SamplingParams: &pb.SamplingParams{MaxTokens: proto.Uint32(32), Temperature: proto.Float32(0)},
	})
	defer stream.Close()
	for {
		piece, err := stream.Recv()
		if err == io.EOF {
			fmt.Println()
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(piece.GetText())
	}
}

func cancel(ctx context.Context, client *triptych.Client, _ []string) error {
	stream := client.Generate(ctx, request("Count for ever:", 500))
	pieces := 0
	for ; pieces < 3; pieces++ {
		if _, err := stream.Recv(); err != nil {
			return err
		}
	}
	stream.Close() // as the end of its context would
	fmt.Printf("cancelled after %d pieces\n", pieces)
	return nil
}

func deadline(ctx context.Context, client *triptych.Client, _ []string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
	defer cancel()
	stream := client.Generate(ctx, request("Too slow:", 100))
	for {
		_, err := stream.Recv()
		var failure *triptych.Error
		switch {
		case err == nil:
		case err == io.EOF:
			fmt.Println("faster than its deadline")
			return nil
		case errors.As(err, &failure) && failure.Code == codes.DeadlineExceeded:
			fmt.Println("deadline exceeded, as it should be")
			return nil
		default:
			return err
		}
	}
}

func refused(ctx context.Context, client *triptych.Client, _ []string) error {
	bad := request("x", 1)
	bad.SamplingParams.TopP = proto.Float32(1.5)
	stream := client.Generate(ctx, bad)
	defer stream.Close()
	_, err := stream.Recv()
	var failure *triptych.Error
	if errors.As(err, &failure) && failure.Code == codes.InvalidArgument {
		fmt.Printf("refused: %s\n", failure.Field)
		return nil
	}
	return fmt.Errorf("not refused: %v", err)
}

func session(ctx context.Context, client *triptych.Client, _ []string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	session, err := client.OpenSession(ctx)
	if err != nil {
		return err
	}
	tokens := map[uint64]int{}
	for i := 0; i < 4; i++ {
		id, err := session.Generate(request("Request", 16))
		if err != nil {
			return err
		}
		tokens[id] = 0
	}
	unwanted, err := session.Generate(request("Unwanted", 100))
	if err != nil {
		return err
	}
	if err := session.Cancel(unwanted); err != nil {
		return err
	}
	if err := session.CloseSend(); err != nil {
		return err
	}
	for {
		event, err := session.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if failed := event.GetError(); failed != nil {
			return triptych.SessionError(failed)
		}
		if event.GetOutput().GetFinishReason() == pb.FinishReason_FINISH_REASON_ABORT {
			fmt.Printf("request %d was aborted\n", event.GetId())
		} else if event.GetId() != unwanted {
			tokens[event.GetId()] += len(event.GetOutput().GetTokenIds())
		}
	}
	ids := make([]uint64, 0, len(tokens))
	for id := range tokens {
		ids = append(ids, id)
	}
	sort.Slice(ids, func(a, b int) bool { return ids[a] < ids[b] })
	for _, id := range ids {
		fmt.Printf("request %d: %d tokens\n", id, tokens[id])
	}
	return nil
}

var commands = []struct {
	name string
	run  func(context.Context, *triptych.Client, []string) error
}{
	{"generate", generate}, {"chat", chat}, {"cancel", cancel},
	{"deadline", deadline}, {"refused", refused}, {"session", session},
}

func main() {
	address, wanted, arguments := "127.0.0.1:50051", "", os.Args[1:]
	if len(arguments) > 0 {
		address, arguments = arguments[0], arguments[1:]
	}
	if len(arguments) > 0 {
		wanted, arguments = arguments[0], arguments[1:]
	}
	client, err := triptych.Dial(address)
	if err != nil {
		fail(err)
	}
	defer client.Close()
	ran := false
	for _, command := range commands {
		if wanted != "" && wanted != command.name {
			continue
		}
		ran = true
		fmt.Printf("== %s\n", command.name)
		if err := command.run(context.Background(), client, arguments); err != nil {
			fail(err)
		}
	}
	if !ran {
		fmt.Fprintln(os.Stderr, "usage: example ADDRESS [COMMAND [ARGUMENTS]]")
		os.Exit(2)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "example:", err)
	os.Exit(1)
}
