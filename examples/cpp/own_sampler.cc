// Requests whose tokens this program draws itself, from the engine's logits in shared memory: the
// most likely one each time, so that the engine's own greedy answers are the same.
//
//   own_sampler ADDRESS RUN_DIR [--requests N] [--tokens N] [--builtin | --bench ROUNDS]
//
// Prints each answer's text and token ids. --builtin: the engine draws. --bench: both by turns;
// prints microseconds per token of a stream, from its first token on: the engine's, this program's
// and the difference, of every round and in the median.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <iostream>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "triptych_client.h"
#include "triptych_sampler.h"

namespace {

namespace v1 = triptych::v1;
using Clock = std::chrono::steady_clock;

struct Arguments {
  std::string address;
  std::string run_dir;
  uint32_t requests = 4;
  uint32_t tokens = 32;
  bool builtin = false;
  int bench = 0;
};

struct Answer {
  std::string text;
  std::vector<uint32_t> token_ids;
  size_t first_tokens = 0;  // of the first piece
  Clock::time_point first, last;
};

using Answers = std::map<uint64_t, Answer>;

float Highest(const float* begin, const float* end) {
  constexpr size_t kLanes = 16;  // independent of one another: the compiler makes vectors of them
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<float>::infinity());
  for (; end - begin >= static_cast<std::ptrdiff_t>(kLanes); begin += kLanes) {
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = begin[i] > lanes[i] ? begin[i] : lanes[i];
  }
  float highest = *std::max_element(lanes, lanes + kLanes);
  for (; begin != end; ++begin) highest = std::max(highest, *begin);
  return highest;
}

// The lowest of the most likely token ids, as the engine's greedy draw.
uint32_t Argmax(const triptych::Row& row) {
  constexpr size_t kBlock = 512;
  const float *const end = row.logits + row.size, *where = row.logits;
  float highest = -std::numeric_limits<float>::infinity();
  for (size_t start = 0; start < row.size; start += kBlock) {
    const float* block = row.logits + start;
    const float found = Highest(block, row.logits + std::min(row.size, start + kBlock));
    if (found > highest) highest = found, where = block;
  }
  return static_cast<uint32_t>(std::find(where, end, highest) - row.logits);
}

// All requests at once, in one session. Without a sampler, the engine draws.
Answers Ask(triptych::Client* client, const triptych::Sampler* sampler, const Arguments& arguments,
            int round) {
  auto session = client->OpenSession();
  Answers answers;
  for (uint32_t i = 0; i < arguments.requests; ++i) {
    v1::GenerateRequest request;
    request.set_text("Story " + std::to_string(round) + "." + std::to_string(i) + ": once");
    auto* params = request.mutable_sampling_params();
    params->set_max_tokens(arguments.tokens);
    params->set_ignore_eos(true);
    if (sampler != nullptr) {
      sampler->Apply(params, i);
    } else {
      params->set_temperature(0);
    }
    answers[session->Start(request)];
  }
  session->Close();
  for (v1::SessionEvent event; session->Next(&event);) {
    if (event.has_error()) throw triptych::Error(event.error());
    Answer& answer = answers[event.id()];
    const auto& ids = event.output().token_ids();
    answer.last = Clock::now();
    if (answer.token_ids.empty()) {
      answer.first = answer.last;
      answer.first_tokens = ids.size();
    }
    answer.token_ids.insert(answer.token_ids.end(), ids.begin(), ids.end());
    answer.text += event.output().text();
  }
  return answers;
}

void Print(const Answers& answers) {
  for (const auto& [id, answer] : answers) {
    std::cout << id << ": " << answer.text << "\n" << id << ":";
    for (const uint32_t token : answer.token_ids) std::cout << " " << token;
    std::cout << "\n";
  }
}

double MicrosecondsPerToken(const Answers& answers) {
  double seconds = 0, tokens = 0;
  for (const auto& [id, answer] : answers) {
    seconds += std::chrono::duration<double>(answer.last - answer.first).count();
    tokens += answer.token_ids.size() - answer.first_tokens;
  }
  return 1e6 * seconds / tokens;
}

bool SameTokens(const Answers& some, const Answers& others) {
  return std::equal(some.begin(), some.end(), others.begin(), others.end(),
                    [](const auto& one, const auto& other) {
                      return one.second.token_ids == other.second.token_ids;
                    });
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

void Bench(triptych::Client* client, const triptych::Sampler& sampler, const Arguments& arguments) {
  std::vector<double> builtin, own, adds;
  for (int round = 0; round <= arguments.bench; ++round) {
    const bool builtin_first = round % 2 == 0;
    const Answers first = Ask(client, builtin_first ? nullptr : &sampler, arguments, round);
    const Answers second = Ask(client, builtin_first ? &sampler : nullptr, arguments, round);
    if (!SameTokens(first, second)) throw std::runtime_error("the two do not draw the same");
    if (round == 0) continue;  // warm-up
    builtin.push_back(MicrosecondsPerToken(builtin_first ? first : second));
    own.push_back(MicrosecondsPerToken(builtin_first ? second : first));
    adds.push_back(own.back() - builtin.back());
    std::cout << "round " << builtin.back() << " " << own.back() << " " << adds.back() << std::endl;
  }
  std::cout << "median " << Median(builtin) << " " << Median(own) << " " << Median(adds) << "\n";
}

void Run(const Arguments& arguments) {
  triptych::Client client(arguments.address);
  if (arguments.builtin) return Print(Ask(&client, nullptr, arguments, 0));
  triptych::SamplerOptions options;
  options.num_rows = arguments.requests;
  triptych::Sampler sampler(arguments.run_dir, Argmax, options);
  sampler.Start();
  if (arguments.bench > 0) {
    Bench(&client, sampler, arguments);
  } else {
    Print(Ask(&client, &sampler, arguments, 0));
  }
  sampler.Stop();
  sampler.Join();
}

bool Parse(const std::vector<std::string>& words, Arguments* arguments) {
  if (words.size() < 2) return false;
  arguments->address = words[0];
  arguments->run_dir = words[1];
  for (size_t i = 2; i < words.size(); ++i) {
    if (words[i] == "--builtin") {
      arguments->builtin = true;
      continue;
    }
    if (i + 1 == words.size()) return false;
    const int number = std::stoi(words[i + 1]);
    if (number < 1) return false;
    if (words[i] == "--requests") {
      arguments->requests = number;
    } else if (words[i] == "--tokens") {
      arguments->tokens = number;
    } else if (words[i] == "--bench") {
      arguments->bench = number;
    } else {
      return false;
    }
    ++i;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Arguments arguments;
    if (!Parse({argv + 1, argv + argc}, &arguments)) {
      std::cerr << "usage: own_sampler ADDRESS RUN_DIR [--requests N] [--tokens N] "
                   "[--builtin | --bench ROUNDS]\n";
      return 2;
    }
    Run(arguments);
  } catch (const std::exception& error) {
    std::cout << std::flush;
    std::cerr << "own_sampler: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
