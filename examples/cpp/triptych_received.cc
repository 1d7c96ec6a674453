#include "triptych_received.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "triptych_client.h"

namespace triptych {
namespace {

// What of an item is compared.
char KeyOf(char byte) { return byte; }
uint32_t KeyOf(uint32_t token_id) { return token_id; }
uint32_t KeyOf(const v1::TokenLogprob& logprob) { return logprob.token_id(); }
const std::string& KeyOf(const std::string& name) { return name; }

// Whether a response says anything beside which choice it is of.
template <class Response>
bool SaysSomething(Response* response) {
  const uint32_t index = response->index();
  response->clear_index();
  const bool something = response->ByteSizeLong() > 0;
  response->set_index(index);
  return something;
}

std::string CallName(uint32_t index, const char* part) {
  return "tool_calls[" + std::to_string(index) + "]." + part;
}

}  // namespace

template <class Item>
template <class Piece>
size_t Received::Column<Item>::Take(const std::string& name, Piece* piece) {
  const auto known = std::min<size_t>(piece->size(), items_.size() - told_);
  const auto end = piece->begin() + known;
  for (auto item = piece->begin(); item != end; ++item, ++told_) {
    if (items_[told_] != KeyOf(*item)) {
      throw ResumeMismatch(name + ": item " + std::to_string(told_) + " differs, told again");
    }
  }
  for (auto item = end; item != piece->end(); ++item, ++told_) items_.push_back(KeyOf(*item));
  piece->erase(piece->begin(), end);
  return known;
}

template <class Item>
void Received::Column<Item>::CheckTold(const std::string& name) const {
  if (told_ == items_.size()) return;
  throw ResumeMismatch(name + ": " + std::to_string(items_.size()) +
                       " items were received, told again it ends after " + std::to_string(told_));
}

template <class Visitor>
void Received::Choice::Visit(Visitor visit) {
  visit("text", text);
  visit("token_ids", token_ids);
  visit("logprobs", logprobs);
  visit("reasoning", reasoning);
  for (auto& [index, call] : calls) {
    visit(CallName(index, "name"), call.names);
    visit(CallName(index, "arguments"), call.arguments);
  }
}

void Received::Again() {
  prompt_logprobs_.Again();
  for (auto& [index, choice] : choices_) {
    choice.Visit([](const std::string&, auto& column) { column.Again(); });
  }
}

template <class Response>
bool Received::TakeNew(Response* response) {
  Choice& choice = choices_[response->index()];
  size_t known = choice.text.Take("text", response->mutable_text());
  known += choice.token_ids.Take("token_ids", response->mutable_token_ids());
  known += choice.logprobs.Take("logprobs", response->mutable_logprobs());
  known += prompt_logprobs_.Take("prompt_logprobs", response->mutable_prompt_logprobs());
  if constexpr (std::is_same_v<Response, v1::ChatResponse>) {
    known += choice.reasoning.Take("reasoning", response->mutable_reasoning());
    known += TakeCalls(&choice, response);
  }
  const bool ended_before = TakeEnd(&choice, response);
  PassOn(*response);
  return (known == 0 && !ended_before) || SaysSomething(response);
}

size_t Received::TakeCalls(Choice* choice, v1::ChatResponse* response) {
  size_t known = 0;
  auto* deltas = response->mutable_tool_calls();
  for (auto& delta : *deltas) {
    Call& call = choice->calls[delta.index()];
    std::vector<std::string> names;
    if (!delta.name().empty()) names.push_back(delta.name());
    if (call.names.Take(CallName(delta.index(), "name"), &names) > 0) {
      // The id of a call is drawn by the engine: the first one stays.
      delta.clear_id();
      delta.clear_name();
      ++known;
    }
    known += call.arguments.Take(CallName(delta.index(), "arguments"), delta.mutable_arguments());
  }
  if (known > 0) {
    const auto empty = [](const auto& each) {
      return each.name().empty() && each.arguments().empty();
    };
    deltas->erase(std::remove_if(deltas->begin(), deltas->end(), empty), deltas->end());
  }
  return known;
}

// Whether the choice has ended before: then it does not end again.
template <class Response>
bool Received::TakeEnd(Choice* choice, Response* response) {
  if (response->finish_reason() == v1::FINISH_REASON_UNSPECIFIED) return false;
  // One that is cancelled, while it is told again too, ends anywhere.
  const bool aborted = response->finish_reason() == v1::FINISH_REASON_ABORT;
  if (!aborted) {
    choice->Visit([](const std::string& name, auto& column) { column.CheckTold(name); });
  }
  const auto before = std::exchange(choice->finish_reason, response->finish_reason());
  if (before == v1::FINISH_REASON_UNSPECIFIED) return false;
  if (before != response->finish_reason() && !aborted) {
    const auto name = [](auto reason) { return std::string(v1::FinishReason_Name(reason)); };
    throw ResumeMismatch("finish_reason: was " + name(before) + ", told again it is " +
                         name(response->finish_reason()));
  }
  response->clear_finish_reason();
  response->clear_stop_reason();
  response->clear_score();
  return true;
}

template bool Received::TakeNew(v1::GenerateResponse*);
template bool Received::TakeNew(v1::ChatResponse*);

}  // namespace triptych
