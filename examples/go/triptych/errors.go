package triptych

import (
	"errors"
	"time"

	"github.com/golang/protobuf/proto" // takes the messages of an old genproto too
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "triptych.dev/gen/triptych/v1"
)

// Error is a call that ended without its whole answer, made from gRPC's status and its google.rpc
// details.
type Error struct {
	Code    codes.Code
	Message string
	// Field is what is out of its bound, for InvalidArgument.
	Field string
	// RetryAfter is how long to wait before the same request has a chance; 0 where nobody said so.
	RetryAfter time.Duration

	hasRetryInfo bool
	cause        error
}

// ErrResumeMismatch: after the connection broke, the engine told the answer differently, so that it
// cannot be gone on with. Such an *Error (DataLoss) wraps it.
var ErrResumeMismatch = errors.New("an answer that was told again differs")

func (e *Error) Error() string { return e.Code.String() + ": " + e.Message }

// Unwrap is for errors.Is.
func (e *Error) Unwrap() error { return e.cause }

// Retryable says whether the same request may succeed later: Unavailable always, ResourceExhausted
// when it carries RetryInfo.
func (e *Error) Retryable() bool {
	return e.Code == codes.Unavailable || e.Code == codes.ResourceExhausted && e.hasRetryInfo
}

func mismatch(message string) *Error {
	return &Error{Code: codes.DataLoss, Message: message, cause: ErrResumeMismatch}
}

func errorOf(err error) *Error { return errorOfStatus(status.Convert(err)) }

func errorOfStatus(s *status.Status) *Error {
	e := &Error{Code: s.Code(), Message: s.Message()}
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.RetryInfo:
			e.RetryAfter, e.hasRetryInfo = d.GetRetryDelay().AsDuration(), true
		case *errdetails.BadRequest:
			if violations := d.GetFieldViolations(); len(violations) > 0 {
				e.Field = violations[0].GetField()
			}
		}
	}
	return e
}

// SessionError is the error of one request of a session.
func SessionError(failed *pb.SessionError) *Error {
	s := &spb.Status{}
	if err := proto.Unmarshal(failed.GetStatus(), s); err != nil || len(failed.GetStatus()) == 0 {
		s = &spb.Status{Code: failed.GetCode(), Message: failed.GetMessage()}
	}
	return errorOfStatus(status.FromProto(s))
}
