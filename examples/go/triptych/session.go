package triptych

import (
	"context"
	"io"
	"sort"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "triptych.dev/gen/triptych/v1"
)

// Session is many requests on one stream: the cheap form for sidecars. Start and Cancel from any
// goroutine, Next from one. When the stream breaks, Next has all requests started again and goes on
// with their answers. A session that is not read to its end must have its context ended.
type Session struct {
	client *Client
	ctx    context.Context

	writing sync.Mutex // of the stream; taken before lock
	stream  pb.InferenceService_SessionClient
	lastID  uint64
	closed  bool
	ended   error // what Next returns from here on

	lock    sync.Mutex
	running map[uint64]*running

	// Next's alone.
	events   []*pb.SessionEvent
	opened   time.Time
	failures int
}

// running is a request that has not ended, and what it takes to send it again. Only where that is
// wanted.
type running struct {
	start     *pb.SessionStart
	prepare   func(spent time.Duration) error
	began     time.Time
	received  received
	cancelled bool
	again     bool // it has been started again
	failures  int  // since then, in a row
}

// OpenSession opens the stream.
func (c *Client) OpenSession(ctx context.Context) (*Session, error) {
	s := &Session{client: c, ctx: ctx, running: map[uint64]*running{}}
	if err := s.open(); err != nil {
		return nil, errorOf(err)
	}
	return s, nil
}

// Generate starts a request and returns its id, which its events carry.
func (s *Session) Generate(request *pb.GenerateRequest) (uint64, error) {
	sent := proto.Clone(request).(*pb.GenerateRequest)
	prepare := s.client.preparing(&sent.SamplingParams, &sent.TimeoutMs)
	return s.start(&pb.SessionStart{Request: &pb.SessionStart_Generate{Generate: sent}}, prepare)
}

// Chat starts a request and returns its id, which its events carry.
func (s *Session) Chat(request *pb.ChatRequest) (uint64, error) {
	sent := proto.Clone(request).(*pb.ChatRequest)
	prepare := s.client.preparing(&sent.SamplingParams, &sent.TimeoutMs)
	return s.start(&pb.SessionStart{Request: &pb.SessionStart_Chat{Chat: sent}}, prepare)
}

// Cancel ends a request, with FINISH_REASON_ABORT. Not after CloseSend.
func (s *Session) Cancel(id uint64) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	if err := s.over(); err != nil {
		return err
	}
	s.lock.Lock()
	if r := s.running[id]; r != nil {
		r.cancelled = true
	}
	s.lock.Unlock()
	return s.send(cancelOf(id))
}

// CloseSend says that no more requests come; those that run end, then Next returns io.EOF.
func (s *Session) CloseSend() error {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.closed = true
	return s.stream.CloseSend()
}

// Next returns the next event of any request. An `error` event (see SessionError) ends its request
// only; one with DataLoss is what ErrResumeMismatch is of a stream. An error returned here is the end
// of all of them.
func (s *Session) Next() (*pb.SessionEvent, error) {
	for {
		for len(s.events) > 0 {
			event := s.events[0]
			s.events = s.events[1:]
			if s.take(event) {
				s.failures = 0
				return event, nil
			}
		}
		if s.ended != nil {
			return nil, s.ended
		}
		if response, err := s.stream.Recv(); err == nil {
			s.events = response.GetEvents()
		} else {
			s.goOn(err)
		}
	}
}

func (s *Session) start(start *pb.SessionStart, prepare func(time.Duration) error) (uint64, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	if err := s.over(); err != nil {
		return 0, err
	}
	s.lastID++
	start.Id = s.lastID
	if s.client.Resume {
		s.lock.Lock()
		s.running[start.Id] = &running{start: start, prepare: prepare, began: time.Now()}
		s.lock.Unlock()
	}
	err := s.send(&pb.SessionRequest{Action: &pb.SessionRequest_Start{Start: start}})
	if err != nil {
		s.lock.Lock()
		delete(s.running, start.Id)
		s.lock.Unlock()
	}
	return start.Id, err
}

// over is why nothing may be sent any more, under writing. gRPC ends a stream with all of its
// requests if something is sent behind its end.
func (s *Session) over() error {
	if s.closed || s.ended != nil {
		return &Error{Code: codes.Unavailable, Message: "the session has ended"}
	}
	return nil
}

// send's io.EOF means that the stream has broken: Next finds out.
func (s *Session) send(message *pb.SessionRequest) error {
	if err := s.stream.Send(message); err != nil && err != io.EOF {
		return errorOf(err)
	}
	return nil
}

// take leaves in an event what is new of its request; false: nothing is.
func (s *Session) take(event *pb.SessionEvent) bool {
	if !s.client.Resume {
		return true
	}
	isNew, failed := s.takeOutput(event)
	if failed != nil {
		event.Event = &pb.SessionEvent_Error{Error: eventError(failed)}
		go s.sendTo(s.stream, cancelOf(event.Id))
	}
	return isNew || failed != nil
}

func (s *Session) takeOutput(event *pb.SessionEvent) (isNew bool, failed *Error) {
	s.lock.Lock()
	defer s.lock.Unlock()
	r := s.running[event.Id]
	if r == nil {
		return false, nil
	}
	switch said := event.Event.(type) {
	case *pb.SessionEvent_Output:
		isNew, failed = r.received.take(said.Output)
	case *pb.SessionEvent_Chat:
		isNew, failed = r.received.take(said.Chat)
	case *pb.SessionEvent_Error:
		isNew = true
		if r.again {
			// Of one that had been taken before, this is a part of the break.
			r.failures++
			if wait, again := s.client.Retry.wait(r.failures, SessionError(said.Error)); again {
				message, tooLate := r.startAgain(wait)
				if tooLate == nil {
					stream := s.stream
					time.AfterFunc(wait, func() { s.sendTo(stream, message) })
					return false, nil
				}
				event.Event = &pb.SessionEvent_Error{Error: eventError(tooLate)}
			}
		}
	}
	if isNew {
		r.failures = 0
	}
	if failed != nil || event.GetError() != nil || r.received.complete {
		delete(s.running, event.Id) // what still comes of it is left out
	}
	return isNew, failed
}

// sendTo sends what Next has to say, which itself must read meanwhile: the engine takes no more where
// too much of what it says is not read. To no other stream, and none that is closed: it ends without,
// and what has not ended is started again on the next one.
func (s *Session) sendTo(stream pb.InferenceService_SessionClient, message *pb.SessionRequest) {
	s.writing.Lock()
	defer s.writing.Unlock()
	if s.stream == stream && s.over() == nil {
		s.sendAgain(message)
	}
}

func (s *Session) open() (err error) {
	s.stream, err = s.client.stub.Session(s.ctx)
	s.opened = time.Now()
	return err
}

// goOn opens another stream after one has ended with an error, or ends the session.
func (s *Session) goOn(err error) {
	resume := s.client.Resume
	for err != nil {
		s.writing.Lock()
		s.lock.Lock()
		idle := len(s.running) == 0
		s.lock.Unlock()
		if idle && (err == io.EOF || resume && s.closed) {
			s.ended = io.EOF
		}
		s.writing.Unlock()
		if s.ended != nil {
			return
		}
		if err == io.EOF {
			err = status.Error(codes.Unavailable, cutOff)
		}
		failure := errorOf(err)
		if idle && time.Since(s.opened) > s.client.Retry.LongestWait {
			s.failures = 0 // a row ends here
		}
		s.failures++
		wait, again := s.client.Retry.wait(s.failures, failure)
		if !resume || !again || !sleep(s.ctx, s.client.conn, wait, failure) {
			s.end(endOf(s.ctx, failure))
			return
		}
		err = s.startAgain()
	}
}

func (s *Session) end(why error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.ended = why
}

// startAgain opens another stream and starts on it whatever has not ended.
func (s *Session) startAgain() error {
	s.writing.Lock()
	if err := s.open(); err != nil {
		s.writing.Unlock()
		return err
	}
	messages := s.startsAgain()
	go func() { // as for sendTo; nothing else is sent before
		defer s.writing.Unlock()
		for _, message := range messages {
			s.sendAgain(message)
		}
		if s.closed {
			_ = s.stream.CloseSend()
		}
	}()
	return nil
}

func (s *Session) startsAgain() (messages []*pb.SessionRequest) {
	s.lock.Lock()
	defer s.lock.Unlock()
	for id, r := range s.running {
		if message, tooLate := r.startAgain(0); tooLate == nil {
			messages = append(messages, message)
		} else {
			failed := &pb.SessionEvent_Error{Error: eventError(tooLate)}
			s.events = append(s.events, &pb.SessionEvent{Id: id, Event: failed})
		}
	}
	sort.Slice(messages, func(a, b int) bool { // as they were started
		return messages[a].GetStart().GetId() < messages[b].GetStart().GetId()
	})
	return messages
}

// startAgain is what starts a request again, so much later.
func (r *running) startAgain(wait time.Duration) (*pb.SessionRequest, *Error) {
	r.again = true
	r.received.again()
	if err := r.prepare(time.Since(r.began) + wait); err != nil {
		return nil, errorOf(err)
	}
	start := proto.Clone(r.start).(*pb.SessionStart)
	return &pb.SessionRequest{Action: &pb.SessionRequest_Start{Start: start}}, nil
}

// sendAgain: where the stream has broken again, Next finds out.
func (s *Session) sendAgain(message *pb.SessionRequest) {
	_ = s.send(message)
	s.lock.Lock()
	r := s.running[message.GetStart().GetId()]
	cancelled := r != nil && r.cancelled
	s.lock.Unlock()
	if cancelled {
		_ = s.send(cancelOf(message.GetStart().GetId()))
	}
}

func cancelOf(id uint64) *pb.SessionRequest {
	return &pb.SessionRequest{Action: &pb.SessionRequest_Cancel{Cancel: &pb.SessionCancel{Id: id}}}
}

func eventError(e *Error) *pb.SessionError {
	return &pb.SessionError{Code: int32(e.Code), Message: e.Message}
}
