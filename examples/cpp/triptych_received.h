// What has been received of an answer, so that the same answer, told again from its beginning, goes
// on behind it. Knows neither gRPC nor time.
//
// What an engine tells for a seed is always the same; how it cuts it into responses is not. Every
// column (the text, the token ids, ...) is therefore counted and compared by itself.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "triptych/v1/inference.pb.h"

namespace triptych {

class Received {
 public:
  // Takes every response of every attempt, and leaves in it what is new; false: nothing is. Throws
  // ResumeMismatch.
  bool Take(v1::GenerateResponse* response) { return TakeNew(response); }
  bool Take(v1::ChatResponse* response) { return TakeNew(response); }
  // Of an answer that nobody will go on with: nothing of it is kept or left out.
  template <class Response>
  void PassOn(const Response& response) {
    any_ = true;
    complete_ = complete_ || response.has_usage();
  }
  // From here on the answer is told from its beginning.
  void Again();

  bool any() const { return any_; }            // whether anything has been received
  bool complete() const { return complete_; }  // whether all of it has been

 private:
  // Items that responses bring in pieces: bytes of UTF-8, token ids.
  template <class Item>
  class Column {
   public:
    // Takes off a piece what has been received before; returns how many items that were.
    template <class Piece>
    size_t Take(const std::string& name, Piece* piece);
    void Again() { told_ = 0; }
    // Throws unless all that was received has been told again.
    void CheckTold(const std::string& name) const;

   private:
    std::vector<Item> items_;
    size_t told_ = 0;
  };

  struct Call {
    Column<std::string> names;
    Column<char> arguments;
  };

  struct Choice {
    Column<char> text, reasoning;
    Column<uint32_t> token_ids, logprobs;
    std::map<uint32_t, Call> calls;
    v1::FinishReason finish_reason = v1::FINISH_REASON_UNSPECIFIED;

    // Of every column, its name and itself.
    template <class Visitor>
    void Visit(Visitor visit);
  };

  template <class Response>
  bool TakeNew(Response* response);
  static size_t TakeCalls(Choice* choice, v1::ChatResponse* response);
  template <class Response>
  static bool TakeEnd(Choice* choice, Response* response);

  std::map<uint32_t, Choice> choices_;
  Column<uint32_t> prompt_logprobs_;
  bool any_ = false;
  bool complete_ = false;
};

}  // namespace triptych
