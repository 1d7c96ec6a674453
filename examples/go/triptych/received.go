package triptych

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	pb "triptych.dev/gen/triptych/v1"
)

// received is what has been received of an answer, so that the same answer, told again from its
// beginning, goes on behind it. Knows neither gRPC nor time.
//
// What an engine tells for a seed is always the same; how it cuts it into responses is not. Every
// column (the text, the token ids, ...) is therefore counted and compared by itself.
type received struct {
	choices        map[uint32]*choice
	promptLogprobs column[uint32]
	any            bool   // something has been received
	complete       bool   // all of it has been
	mismatch       *Error // the first one; nothing counts after it
}

// choice is what has been received of one of the answer's choices.
type choice struct {
	text, reasoning    column[byte]
	tokenIDs, logprobs column[uint32]
	calls              map[uint32]*toolCall
	finishReason       pb.FinishReason
}

type toolCall struct {
	names     column[string]
	arguments column[byte]
}

// column is items that responses bring in pieces: bytes of UTF-8, token ids.
type column[T comparable] struct {
	items []T
	told  int
}

// parts is where a response, of either kind, has what it says; reasoning and calls are a chat's.
type parts struct {
	index                    uint32
	text, reasoning          *string
	tokenIDs                 *[]uint32
	logprobs, promptLogprobs *[]*pb.TokenLogprob
	calls                    *[]*pb.ToolCallDelta
	finishReason             *pb.FinishReason
	usage                    *pb.Usage
	clearEnd                 func()
}

func partsOf(response proto.Message) parts {
	switch r := response.(type) {
	case *pb.GenerateResponse:
		return parts{
			index: r.Index, text: &r.Text, tokenIDs: &r.TokenIds,
			logprobs: &r.Logprobs, promptLogprobs: &r.PromptLogprobs,
			reasoning: new(string), calls: new([]*pb.ToolCallDelta),
			finishReason: &r.FinishReason, usage: r.Usage,
			clearEnd: func() { r.FinishReason, r.StopReason, r.Score = 0, nil, nil },
		}
	case *pb.ChatResponse:
		return parts{
			index: r.Index, text: &r.Text, tokenIDs: &r.TokenIds,
			logprobs: &r.Logprobs, promptLogprobs: &r.PromptLogprobs,
			reasoning: &r.Reasoning, calls: &r.ToolCalls,
			finishReason: &r.FinishReason, usage: r.Usage,
			clearEnd: func() { r.FinishReason, r.StopReason, r.Score = 0, nil, nil },
		}
	}
	panic("neither of the two responses there are")
}

// take takes every response of every attempt and leaves in it what is new; false: nothing is.
func (r *received) take(response proto.Message) (bool, *Error) {
	p := partsOf(response)
	c := r.choice(p.index)
	known := takeText(r, &c.text, "text", p.text)
	known += takeItems(r, &c.tokenIDs, "token_ids", p.tokenIDs, func(id uint32) uint32 { return id })
	known += takeItems(r, &c.logprobs, "logprobs", p.logprobs, (*pb.TokenLogprob).GetTokenId)
	known += takeItems(r, &r.promptLogprobs, "prompt_logprobs", p.promptLogprobs, (*pb.TokenLogprob).GetTokenId)
	known += takeText(r, &c.reasoning, "reasoning", p.reasoning)
	known += r.takeCalls(c, p.calls)
	endedBefore := r.takeEnd(c, *p.finishReason)
	if endedBefore {
		p.clearEnd()
	}
	r.passOn(response)
	// Of a response without anything new, the index is left.
	index := &pb.GenerateResponse{Index: p.index}
	return known == 0 && !endedBefore || proto.Size(response) > proto.Size(index), r.mismatch
}

// passOn takes a response of an answer that nobody will go on with: nothing of it is kept.
func (r *received) passOn(response proto.Message) {
	r.any = true
	r.complete = r.complete || partsOf(response).usage != nil
}

// again: from here on the answer is told from its beginning.
func (r *received) again() {
	r.promptLogprobs.told = 0
	for _, c := range r.choices {
		c.text.told, c.reasoning.told, c.tokenIDs.told, c.logprobs.told = 0, 0, 0, 0
		for _, call := range c.calls {
			call.names.told, call.arguments.told = 0, 0
		}
	}
}

func (r *received) choice(index uint32) *choice {
	if r.choices == nil {
		r.choices = map[uint32]*choice{}
	}
	if r.choices[index] == nil {
		r.choices[index] = &choice{calls: map[uint32]*toolCall{}}
	}
	return r.choices[index]
}

func (r *received) takeCalls(c *choice, deltas *[]*pb.ToolCallDelta) int {
	known := 0
	var left []*pb.ToolCallDelta
	for _, delta := range *deltas {
		call := c.calls[delta.Index]
		if call == nil {
			call = &toolCall{}
			c.calls[delta.Index] = call
		}
		var names []string
		if delta.Name != "" {
			names = append(names, delta.Name)
		}
		if again := knownOf(r, &call.names, callName(delta.Index, "name"), names); again > 0 {
			// The id of a call is drawn by the engine: the first one stays.
			delta.Id, delta.Name = "", ""
			known += again
		}
		known += takeText(r, &call.arguments, callName(delta.Index, "arguments"), &delta.Arguments)
		if delta.Name != "" || delta.Arguments != "" {
			left = append(left, delta)
		}
	}
	if known > 0 {
		*deltas = left
	}
	return known
}

// takeEnd says whether the choice has ended before: then it does not end again.
func (r *received) takeEnd(c *choice, now pb.FinishReason) bool {
	if now == pb.FinishReason_FINISH_REASON_UNSPECIFIED {
		return false
	}
	before := c.finishReason
	c.finishReason = now
	endedBefore := before != pb.FinishReason_FINISH_REASON_UNSPECIFIED
	if now == pb.FinishReason_FINISH_REASON_ABORT {
		return endedBefore // one that is cancelled, while it is told again too, ends anywhere
	}
	checkTold(r, &c.text, "text")
	checkTold(r, &c.tokenIDs, "token_ids")
	checkTold(r, &c.logprobs, "logprobs")
	checkTold(r, &c.reasoning, "reasoning")
	for index, call := range c.calls {
		checkTold(r, &call.names, callName(index, "name"))
		checkTold(r, &call.arguments, callName(index, "arguments"))
	}
	if endedBefore && before != now {
		r.differs("finish_reason: was %v, told again it is %v", before, now)
	}
	return endedBefore
}

func (r *received) differs(format string, values ...interface{}) {
	if r.mismatch == nil {
		r.mismatch = mismatch(fmt.Sprintf(format, values...))
	}
}

// knownOf returns how many of the next items of a column have been received before.
func knownOf[T comparable](r *received, c *column[T], name string, items []T) int {
	known := len(c.items) - c.told
	if known > len(items) {
		known = len(items)
	}
	for i, item := range items[:known] {
		if at := c.told + i; item != c.items[at] {
			r.differs("%s: item %d was %v, told again it is %v", name, at, c.items[at], item)
		}
	}
	c.items = append(c.items, items[known:]...)
	c.told += len(items)
	return known
}

// takeText takes off a text what has been received before; returns how many bytes that were.
func takeText(r *received, c *column[byte], name string, text *string) int {
	known := knownOf(r, c, name, []byte(*text))
	*text = (*text)[known:]
	return known
}

// takeItems does so with ids, and with messages that have one.
func takeItems[M any](r *received, c *column[uint32], name string, items *[]M, id func(M) uint32) int {
	ids := make([]uint32, len(*items))
	for i, item := range *items {
		ids[i] = id(item)
	}
	known := knownOf(r, c, name, ids)
	*items = (*items)[known:]
	return known
}

// checkTold: all that was received of a column must have been told again.
func checkTold[T comparable](r *received, c *column[T], name string) {
	if c.told < len(c.items) {
		r.differs("%s: %d items were received, told again it ends after %d", name, len(c.items), c.told)
	}
}

func callName(index uint32, part string) string {
	return fmt.Sprintf("tool_calls[%d].%s", index, part)
}
