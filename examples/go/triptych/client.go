// Package triptych is a small client of Triptych's InferenceService.
//
//	client, err := triptych.Dial("127.0.0.1:50051")
//	stream, err := client.Generate(ctx, &pb.GenerateRequest{
//		Prompt: &pb.GenerateRequest_Text{Text: "Once upon a time"},
//	})
//	defer stream.Close()
//	for {
//		piece, err := stream.Recv() // io.EOF at the end
//		...
//	}
//
// Requests and responses are the generated messages of protos/triptych/v1. Failures are *Error.
// Deadlines and cancellation are the context's; the engine frees everything within one step.
package triptych

import (
	"context"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"

	pb "triptych.dev/gen/triptych/v1"
)

// Client is one channel to an engine, for any number of goroutines.
type Client struct {
	// Retry may be changed before the first call.
	Retry RetryPolicy

	conn *grpc.ClientConn
	stub pb.InferenceServiceClient
}

// Dial connects in the background. Without credentials among the options, say
// grpc.WithInsecure() or grpc.WithTransportCredentials(...); without any option it is the former.
func Dial(address string, options ...grpc.DialOption) (*Client, error) {
	if len(options) == 0 {
		// Deprecated, but in every 1.x; its successor is not in the 1.33 of Debian 12.
		options = append(options, grpc.WithInsecure())
	}
	made := []grpc.DialOption{
		// Calls take turns over all addresses of a dns:/// name: a tokenizer process each.
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`),
		// grpc-go pings no more often than every 10 seconds; the engine takes that.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 20 * time.Second}),
		// Its own pace (1 s, then up to 2 minutes) would fail all attempts of one policy.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second,
			},
			MinConnectTimeout: 5 * time.Second,
		}),
	}
	conn, err := grpc.Dial(address, append(made, options...)...)
	if err != nil {
		return nil, err
	}
	return &Client{Retry: DefaultRetryPolicy, conn: conn, stub: pb.NewInferenceServiceClient(conn)}, nil
}

// Close ends whatever still runs.
func (c *Client) Close() error { return c.conn.Close() }

// Generate completes a prompt. The stream is under way when you get it.
func (c *Client) Generate(ctx context.Context, request *pb.GenerateRequest) *Stream[*pb.GenerateResponse] {
	return newStream(ctx, c.Retry, func(ctx context.Context) (receiver[*pb.GenerateResponse], error) {
		return c.stub.Generate(ctx, request)
	})
}

// Chat streams the assistant's turn after the messages.
func (c *Client) Chat(ctx context.Context, request *pb.ChatRequest) *Stream[*pb.ChatResponse] {
	return newStream(ctx, c.Retry, func(ctx context.Context) (receiver[*pb.ChatResponse], error) {
		return c.stub.Chat(ctx, request)
	})
}

// Tokenize returns the token ids of a text.
func (c *Client) Tokenize(ctx context.Context, text string) ([]uint32, error) {
	response, err := c.stub.Tokenize(ctx, &pb.TokenizeRequest{Text: text})
	if err != nil {
		return nil, errorOf(err)
	}
	return response.GetTokenIds(), nil
}

type receiver[R any] interface{ Recv() (R, error) }

// Stream is the pieces of one answer, for one goroutine. Close it, or end its context.
type Stream[R any] struct {
	ctx      context.Context
	cancel   context.CancelFunc
	retry    RetryPolicy
	open     func(context.Context) (receiver[R], error)
	call     receiver[R]
	failed   error
	failures int
	received bool
}

func newStream[R any](ctx context.Context, retry RetryPolicy, open func(context.Context) (receiver[R], error)) *Stream[R] {
	s := &Stream[R]{retry: retry, open: open}
	s.ctx, s.cancel = context.WithCancel(ctx)
	s.call, s.failed = open(s.ctx)
	return s
}

// Close cancels what still runs. Nothing happens after the end.
func (s *Stream[R]) Close() { s.cancel() }

// Recv returns the next piece; io.EOF at the end, *Error where it fails. A call that was refused
// before it brought anything is sent again as the policy says.
func (s *Stream[R]) Recv() (R, error) {
	for {
		var piece R
		err := s.failed
		if err == nil {
			piece, err = s.call.Recv()
		}
		if err == nil {
			s.received = true
			return piece, nil
		}
		if err == io.EOF {
			s.cancel()
			return piece, err
		}
		failure := errorOf(err)
		s.failures++
		wait, again := s.retry.wait(s.failures, failure)
		if s.received || !again || !sleep(s.ctx, wait) {
			s.cancel()
			return piece, failure
		}
		s.call, s.failed = s.open(s.ctx)
	}
}
