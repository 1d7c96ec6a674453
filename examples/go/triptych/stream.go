package triptych

import (
	"context"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "triptych.dev/gen/triptych/v1"
)

const cutOff = "the stream ended before its answer did"

type receiver[R any] interface{ Recv() (R, error) }

// opening begins an attempt, so long after the first one.
type opening[R any] func(ctx context.Context, spent time.Duration) (receiver[R], error)

// Stream is the pieces of one answer, for one goroutine. Close it, or end its context.
type Stream[R proto.Message] struct {
	ctx      context.Context
	cancel   context.CancelFunc
	conn     *grpc.ClientConn
	retry    RetryPolicy
	resume   bool
	began    time.Time
	open     opening[R]
	call     receiver[R]
	received received
	failures int   // in a row, that brought nothing new
	opened   error // of the last attempt's beginning
	ended    error // what Recv returns from here on
}

func newStream[R proto.Message](ctx context.Context, c *Client, open opening[R]) *Stream[R] {
	s := &Stream[R]{conn: c.conn, retry: c.Retry, resume: c.Resume, began: time.Now(), open: open}
	s.ctx, s.cancel = context.WithCancel(ctx)
	s.call, s.opened = open(s.ctx, 0)
	return s
}

// Close cancels what still runs. Nothing happens after the end.
func (s *Stream[R]) Close() { s.cancel() }

// Recv returns the next piece; io.EOF at the end, *Error where it fails. A call that was refused, or
// whose connection broke, is sent again as the policy says, and what comes again is left out.
func (s *Stream[R]) Recv() (R, error) {
	for s.ended == nil {
		piece, err := s.next()
		switch {
		case s.received.complete && err != nil:
			s.end(io.EOF) // whatever comes behind the whole answer
		case err == nil:
			isNew, mismatch := s.take(piece)
			if mismatch != nil {
				s.end(mismatch)
			} else if isNew {
				s.failures = 0
				return piece, nil
			}
		default:
			s.tryAgain(errorOf(err))
		}
	}
	var none R
	return none, s.ended
}

func (s *Stream[R]) next() (R, error) {
	if s.opened != nil {
		var none R
		return none, s.opened
	}
	piece, err := s.call.Recv()
	if err == io.EOF {
		err = status.Error(codes.Unavailable, cutOff)
	}
	return piece, err
}

// take says whether anything of a piece is new.
func (s *Stream[R]) take(piece R) (bool, *Error) {
	if s.resume {
		return s.received.take(piece)
	}
	s.received.passOn(piece)
	return true, nil
}

func (s *Stream[R]) tryAgain(failure *Error) {
	s.failures++
	wait, again := s.retry.wait(s.failures, failure)
	if s.received.any && !s.resume || !again || !sleep(s.ctx, s.conn, wait, failure) {
		s.end(endOf(s.ctx, failure))
		return
	}
	s.received.again()
	s.call, s.opened = s.open(s.ctx, time.Since(s.began))
}

func (s *Stream[R]) end(why error) {
	s.ended = why
	s.cancel()
}

// preparing sets the seed of a request where none is, so that the same request has the same answer.
// It returns what sets the request's time-out, which counts from its arrival, so long after the first
// attempt.
func (c *Client) preparing(params **pb.SamplingParams, timeoutMs **uint32) func(time.Duration) error {
	if c.Resume {
		setSeed(params)
	}
	whole := *timeoutMs
	return func(spent time.Duration) error {
		milliseconds := spent.Milliseconds()
		if whole == nil || milliseconds == 0 {
			return nil
		}
		if milliseconds >= int64(*whole) {
			return status.Error(codes.DeadlineExceeded, "timeout_ms passed")
		}
		*timeoutMs = proto.Uint32(*whole - uint32(milliseconds))
		return nil
	}
}

func setSeed(params **pb.SamplingParams) {
	if *params == nil {
		*params = &pb.SamplingParams{}
	}
	if (*params).Seed != nil || (*params).Beam != nil {
		return
	}
	(*params).Seed = proto.Uint64(randomUint64())
}
