package triptych

import (
	"context"
	"math/rand"
	"time"
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
	jittered := backoff/2 + time.Duration(rand.Int63n(int64(backoff/2)+1))
	return err.RetryAfter + jittered, true
}

// sleep waits, unless the context ends before or would by then.
func sleep(ctx context.Context, wait time.Duration) bool {
	if deadline, ok := ctx.Deadline(); ok && time.Now().Add(wait).After(deadline) {
		return false
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
