// For tests of examples/go: sends the serialized request on stdin and writes what comes, each
// response behind its length (4 bytes, little-endian).
//
//	relay ADDRESS generate|chat [--session] [--no-resume] [--timeout MS]
//	      [--first-wait MS] [--longest-wait MS] [--cancel MS] [--twice] [--open]
//
// --cancel: so long after it has begun. --twice: a session's request, two times. --open: the session is closed only when all has come.
package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	"triptych.dev/examples/go/triptych"
	pb "triptych.dev/gen/triptych/v1"
)

func main() {
	client, err := triptych.Dial(os.Args[1])
	check(err)
	ctx, session, requests, open := context.Background(), false, 1, false
	for i := 3; i < len(os.Args); i++ {
		switch os.Args[i] {
		case "--session":
			session = true
		case "--twice":
			requests = 2
		case "--open":
			open = true
		case "--no-resume":
			client.Resume = false
		case "--timeout":
			i++
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, milliseconds(os.Args[i]))
			defer cancel()
		case "--cancel":
			i++
			var cancel context.CancelFunc
			ctx, cancel = context.WithCancel(ctx)
			time.AfterFunc(milliseconds(os.Args[i]), cancel)
		case "--first-wait":
			i++
			client.Retry.FirstWait = milliseconds(os.Args[i])
		case "--longest-wait":
			i++
			client.Retry.LongestWait = milliseconds(os.Args[i])
		}
	}
	sent, err := io.ReadAll(os.Stdin)
	check(err)
	generate, chat := &pb.GenerateRequest{}, &pb.ChatRequest{}
	isChat := os.Args[2] == "chat"
	if isChat {
		check(proto.Unmarshal(sent, chat))
	} else {
		check(proto.Unmarshal(sent, generate))
	}
	switch {
	case session:
		session, err := client.OpenSession(ctx)
		check(err)
		if isChat {
			_, err = session.Chat(chat)
		} else {
			for i := 0; i < requests; i++ {
				_, err = session.Generate(generate)
				check(err)
			}
		}
		check(err)
		if !open {
			check(session.CloseSend())
			if _, err = session.Generate(generate); err == nil {
				panic("a closed session takes a request")
			}
		}
		relaySession(session, requests, open)
	case isChat:
		relay(client.Chat(ctx, chat))
	default:
		relay(client.Generate(ctx, generate))
	}
}

func relaySession(session *triptych.Session, requests int, open bool) {
	var failed error
	for {
		event, err := session.Next()
		if err == io.EOF {
			check(failed)
			return
		}
		check(err)
		if event.GetOutput().GetUsage() != nil || event.GetError() != nil {
			if requests--; requests == 0 && open {
				check(session.CloseSend())
			}
		}
		switch said := event.Event.(type) {
		case *pb.SessionEvent_Output:
			write(said.Output)
		case *pb.SessionEvent_Chat:
			write(said.Chat)
		case *pb.SessionEvent_Error:
			failed = triptych.SessionError(said.Error)
		}
	}
}

func milliseconds(text string) time.Duration {
	number, err := strconv.Atoi(text)
	check(err)
	return time.Duration(number) * time.Millisecond
}

func relay[R proto.Message](stream *triptych.Stream[R]) {
	defer stream.Close()
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return
		}
		check(err)
		write(response)
	}
}

func write(response proto.Message) {
	bytes, err := proto.Marshal(response)
	check(err)
	check(binary.Write(os.Stdout, binary.LittleEndian, uint32(len(bytes))))
	_, err = os.Stdout.Write(bytes)
	check(err)
}

func check(err error) {
	if err == nil {
		return
	}
	var failure *triptych.Error
	if !errors.As(err, &failure) {
		panic(err)
	}
	mismatch := ""
	if errors.Is(err, triptych.ErrResumeMismatch) {
		mismatch = "mismatch "
	}
	fmt.Fprintf(os.Stderr, "%d %s%s", failure.Code, mismatch, failure.Message)
	os.Exit(1)
}
