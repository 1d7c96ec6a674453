package triptych

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
)

// RetryPolicy is exponential back-off with jitter, never before the time that the engine asked for.
type RetryPolicy struct {
	Attempts          int
	FirstWait         time.Duration
	LongestWait       time.Duration
	LongestRetryAfter time.Duration
}

// DefaultRetryPolicy suits an engine that is being started again.
var DefaultRetryPolicy = RetryPolicy{
	Attempts:          8,
	FirstWait:         100 * time.Millisecond,
	LongestWait:       5 * time.Second,
	LongestRetryAfter: 30 * time.Second,
}

// wait returns how long to wait after so many failures in a row, from 1; false: give up.
func (p RetryPolicy) wait(failures int, err *Error) (time.Duration, bool) {
	if !err.Retryable() || failures >= p.Attempts || err.RetryAfter > p.LongestRetryAfter {
		return 0, false
	}
	backoff := p.FirstWait
	for i := 1; i < failures && backoff < p.LongestWait; i++ {
		backoff *= 2
	}
	if backoff > p.LongestWait {
		backoff = p.LongestWait
	}
	// Half of it at least, so that clients that failed together come again apart.
	jittered := backoff/2 + time.Duration(randomUint64()%uint64(backoff/2+1))
	return err.RetryAfter + jittered, true
}

// sleep waits so long, or until the connection is there again; false: the context ends before, or
// would by then.
func sleep(ctx context.Context, conn *grpc.ClientConn, wait time.Duration, err *Error) bool {
	if deadline, ok := ctx.Deadline(); ok && time.Now().Add(wait).After(deadline) {
		return false
	}
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for wasDown := false; waiting.Err() == nil; {
		state := conn.GetState()
		wasDown = wasDown || state != connectivity.Ready
		// What the engine itself asked for is waited for to the end.
		if wasDown && state == connectivity.Ready && !err.hasRetryInfo {
			break
		}
		conn.WaitForStateChange(waiting, state)
	}
	return ctx.Err() == nil
}

// endOf is what a call ends with that is not tried again: its context's end, if that came first.
func endOf(ctx context.Context, failure *Error) *Error {
	if err := ctx.Err(); err != nil {
		return errorOf(status.FromContextError(err).Err())
	}
	return failure
}

// randomUint64: math/rand of Go 1.19 begins with the same number in every process.
func randomUint64() uint64 {
	var bytes [8]byte
	if _, err := rand.Read(bytes[:]); err != nil {
		panic(err) // the system has no randomness: nothing works then
	}
	return binary.LittleEndian.Uint64(bytes[:])
}
