package triptych

import (
	"context"
	"io"
	"sync"

	pb "triptych.dev/gen/triptych/v1"
)

// Session is many requests on one stream: the cheap form for sidecars. Start and Cancel from any
// goroutine, Next from one. A session that is not read to its end must have its context ended.
type Session struct {
	stream  pb.InferenceService_SessionClient
	writing sync.Mutex
	lastID  uint64
	events  []*pb.SessionEvent
}

// OpenSession opens the stream.
func (c *Client) OpenSession(ctx context.Context) (*Session, error) {
	stream, err := c.stub.Session(ctx)
	if err != nil {
		return nil, errorOf(err)
	}
	return &Session{stream: stream}, nil
}

// Generate starts a request and returns its id, which its events carry.
func (s *Session) Generate(request *pb.GenerateRequest) (uint64, error) {
	return s.start(&pb.SessionStart{Request: &pb.SessionStart_Generate{Generate: request}})
}

// Chat starts a request and returns its id, which its events carry.
func (s *Session) Chat(request *pb.ChatRequest) (uint64, error) {
	return s.start(&pb.SessionStart{Request: &pb.SessionStart_Chat{Chat: request}})
}

// Cancel ends a request, with FINISH_REASON_ABORT.
func (s *Session) Cancel(id uint64) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	return s.send(&pb.SessionRequest{
		Action: &pb.SessionRequest_Cancel{Cancel: &pb.SessionCancel{Id: id}},
	})
}

// CloseSend says that no more requests come; those that run end, then Next returns io.EOF.
func (s *Session) CloseSend() error {
	s.writing.Lock()
	defer s.writing.Unlock()
	return s.stream.CloseSend()
}

// Next returns the next event of any request. An `error` event (see SessionError) ends its request
// only; an error returned here is the end of all of them.
func (s *Session) Next() (*pb.SessionEvent, error) {
	for len(s.events) == 0 {
		response, err := s.stream.Recv()
		if err == io.EOF {
			return nil, err
		}
		if err != nil {
			return nil, errorOf(err)
		}
		s.events = response.GetEvents()
	}
	event := s.events[0]
	s.events = s.events[1:]
	return event, nil
}

func (s *Session) start(start *pb.SessionStart) (uint64, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.lastID++
	start.Id = s.lastID
	return start.Id, s.send(&pb.SessionRequest{Action: &pb.SessionRequest_Start{Start: start}})
}

// send's io.EOF means that the stream has broken: Next says why.
func (s *Session) send(message *pb.SessionRequest) error {
	if err := s.stream.Send(message); err != nil && err != io.EOF {
		return errorOf(err)
	}
	return nil
}
