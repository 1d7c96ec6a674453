// Everything that a service does with the engine, one command each.
//
//   example ADDRESS [generate [PROMPT [MAX_TOKENS]] | chat | cancel | deadline | refused | session]
//
// Without a command: all of them.

#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "triptych_client.h"

namespace {

namespace v1 = triptych::v1;
using triptych::Client;
using Arguments = std::vector<std::string>;

v1::GenerateRequest Request(const std::string& prompt, uint32_t max_tokens) {
  v1::GenerateRequest request;
  request.set_text(prompt);
  request.mutable_sampling_params()->set_max_tokens(max_tokens);
  request.mutable_sampling_params()->set_seed(1);
  request.mutable_sampling_params()->set_ignore_eos(true);
  return request;
}

void Generate(Client* client, const Arguments& arguments) {
  const std::string prompt = arguments.empty() ? "Once upon a time" : arguments[0];
  const int max_tokens = arguments.size() < 2 ? 32 : std::stoi(arguments[1]);
  auto stream = client->Generate(Request(prompt, max_tokens));
  v1::Usage usage;
  for (v1::GenerateResponse piece; stream.Read(&piece);) {
    std::cout << piece.text() << std::flush;
    if (piece.has_usage()) usage = piece.usage();
  }
  std::cout << "\n[" << usage.completion_tokens() << " tokens]\n";
}

void Chat(Client* client, const Arguments&) {
  v1::ChatRequest request;
  request.mutable_sampling_params()->set_max_tokens(32);
  request.mutable_sampling_params()->set_temperature(0);
  auto* message = request.add_messages();
  message->set_role("user");
  message->set_content("Name three colours.");
  auto stream = client->Chat(request);
  for (v1::ChatResponse piece; stream.Read(&piece);) std::cout << piece.text() << std::flush;
  std::cout << "\n";
}

void Cancel(Client* client, const Arguments&) {
  int pieces = 0;
  {
    auto stream = client->Generate(Request("Count for ever:", 500));
    for (v1::GenerateResponse piece; pieces < 3 && stream.Read(&piece);) ++pieces;
  }  // leaving the scope cancels; stream.Cancel() does it from another thread
  std::cout << "cancelled after " << pieces << " pieces\n";
}

void Deadline(Client* client, const Arguments&) {
  try {
    auto stream = client->Generate(Request("Too slow:", 100), triptych::Milliseconds(5));
    for (v1::GenerateResponse piece; stream.Read(&piece);) {
    }
    std::cout << "faster than its deadline\n";
  } catch (const triptych::Error& error) {
    if (error.code() != grpc::StatusCode::DEADLINE_EXCEEDED) throw;
    std::cout << "deadline exceeded, as it should be\n";
  }
}

void Refused(Client* client, const Arguments&) {
  v1::GenerateRequest request = Request("x", 1);
  request.mutable_sampling_params()->set_top_p(1.5);
  try {
    v1::GenerateResponse piece;
    client->Generate(request).Read(&piece);
    std::cout << "not refused\n";
  } catch (const triptych::Error& error) {
    if (error.code() != grpc::StatusCode::INVALID_ARGUMENT) throw;
    std::cout << "refused: " << error.field() << "\n";
  }
}

void Session(Client* client, const Arguments&) {
  auto session = client->OpenSession();
  std::map<uint64_t, uint32_t> tokens;
  for (int i = 0; i < 4; ++i) tokens[session->Start(Request("Request", 16))] = 0;
  const uint64_t unwanted = session->Start(Request("Unwanted", 100));
  session->Cancel(unwanted);
  session->Close();
  for (v1::SessionEvent event; session->Next(&event);) {
    if (event.has_error()) throw triptych::Error(event.error());
    if (event.output().finish_reason() == v1::FINISH_REASON_ABORT) {
      std::cout << "request " << event.id() << " was aborted\n";
    } else if (event.id() != unwanted) {
      tokens[event.id()] += event.output().token_ids_size();
    }
  }
  for (const auto& [id, count] : tokens) {
    std::cout << "request " << id << ": " << count << " tokens\n";
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::pair<std::string, std::function<void(Client*, const Arguments&)>>>
      commands = {{"generate", Generate}, {"chat", Chat},       {"cancel", Cancel},
                  {"deadline", Deadline}, {"refused", Refused}, {"session", Session}};
  const std::string wanted = argc > 2 ? argv[2] : "";
  const Arguments arguments(argv + std::min(argc, 3), argv + argc);
  bool ran = false;
  try {
    Client client(argc > 1 ? argv[1] : "127.0.0.1:50051");
    for (const auto& [name, command] : commands) {
      if (!wanted.empty() && wanted != name) continue;
      std::cout << "== " << name << std::endl;
      command(&client, arguments);
      ran = true;
    }
  } catch (const std::exception& error) {
    std::cout << std::flush;
    std::cerr << "example: " << error.what() << "\n";
    return 1;
  }
  if (!ran) std::cerr << "usage: example ADDRESS [COMMAND [ARGUMENTS]]\n";
  return ran ? 0 : 2;
}
