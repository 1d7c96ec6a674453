// Package triptych is a small client of Triptych's InferenceService.
//
//	client, err := triptych.Dial("127.0.0.1:50051")
//	stream := client.Generate(ctx, &pb.GenerateRequest{
//		Prompt: &pb.GenerateRequest_Text{Text: "Once upon a time"},
//	})
//	defer stream.Close()
//	for {
//		piece, err := stream.Recv() // io.EOF at the end
//		...
//	}
//
// Requests and responses are the generated messages of protos/triptych/v1. Failures are *Error.
// Deadlines and cancellation are the context's; the engine frees everything within one step. An answer
// whose connection breaks goes on over the next one.
package triptych

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"

	pb "triptych.dev/gen/triptych/v1"
)

// Client is one channel to an engine, for any number of goroutines.
type Client struct {
	// Retry and Resume may be changed before the first call.
	Retry RetryPolicy
	// Resume: go on with an answer whose connection breaks. Requests without a seed get one.
	Resume bool

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
	client := &Client{Retry: DefaultRetryPolicy, Resume: true, conn: conn, stub: pb.NewInferenceServiceClient(conn)}
	return client, nil
}

// Close ends whatever still runs.
func (c *Client) Close() error { return c.conn.Close() }

// Generate completes a prompt. The stream is under way when you get it.
func (c *Client) Generate(ctx context.Context, request *pb.GenerateRequest) *Stream[*pb.GenerateResponse] {
	sent := proto.Clone(request).(*pb.GenerateRequest)
	prepare := c.preparing(&sent.SamplingParams, &sent.TimeoutMs)
	return newStream(ctx, c, func(ctx context.Context, spent time.Duration) (receiver[*pb.GenerateResponse], error) {
		if err := prepare(spent); err != nil {
			return nil, err
		}
		return c.stub.Generate(ctx, sent)
	})
}

// Chat streams the assistant's turn after the messages.
func (c *Client) Chat(ctx context.Context, request *pb.ChatRequest) *Stream[*pb.ChatResponse] {
	sent := proto.Clone(request).(*pb.ChatRequest)
	prepare := c.preparing(&sent.SamplingParams, &sent.TimeoutMs)
	return newStream(ctx, c, func(ctx context.Context, spent time.Duration) (receiver[*pb.ChatResponse], error) {
		if err := prepare(spent); err != nil {
			return nil, err
		}
		return c.stub.Chat(ctx, sent)
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
