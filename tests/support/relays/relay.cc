// For tests of examples/cpp: sends the serialized request on stdin and writes what comes, each
// response behind its length (4 bytes, little-endian).
//
//   relay ADDRESS generate|chat [--session] [--no-resume] [--timeout MS]
//         [--first-wait MS] [--longest-wait MS] [--cancel MS] [--twice] [--open]
//
// --cancel: so long after it has begun. --twice: a session's request, two times. --open: the
// session is closed only when all has come.

#include <cstdint>
#include <exception>
#include <iostream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "triptych_client.h"

namespace {

namespace v1 = triptych::v1;

template <class Message>
Message FromStdin() {
  Message message;
  const std::string bytes{std::istreambuf_iterator<char>(std::cin), {}};
  if (!message.ParseFromString(bytes)) throw std::invalid_argument("stdin is no request");
  return message;
}

void Write(const google::protobuf::Message& response) {
  const std::string bytes = response.SerializeAsString();
  for (int shift = 0; shift < 32; shift += 8) std::cout.put(bytes.size() >> shift & 0xff);
  std::cout << bytes << std::flush;
}

template <class Response>
void Relay(triptych::Stream<Response> stream, std::optional<triptych::Milliseconds> cancel) {
  std::thread canceller;
  if (cancel) {
    canceller = std::thread([&] {
      std::this_thread::sleep_for(*cancel);
      stream.Cancel();
    });
  }
  const auto join = [&] {
    if (canceller.joinable()) canceller.join();
  };
  try {
    for (Response response; stream.Read(&response);) Write(response);
  } catch (const triptych::Error&) {
    join();
    throw;
  }
  join();
}

void MustNotStart(triptych::Session* session) {
  try {
    session->Start(v1::GenerateRequest());
  } catch (const triptych::Error&) {
    return;
  }
  throw std::logic_error("a closed session takes a request");
}

void Relay(triptych::Session* session, int requests, bool open) {
  if (!open) {
    session->Close();
    MustNotStart(session);
  }
  std::optional<triptych::Error> failed;
  for (v1::SessionEvent event; session->Next(&event);) {
    if (event.has_error()) failed.emplace(event.error());
    if (event.has_output()) Write(event.output());
    if (event.has_chat()) Write(event.chat());
    const bool ended = event.has_error() || event.output().has_usage();
    if (ended && --requests == 0) session->Close();
  }
  if (failed) throw *failed;
}

struct Flags {
  triptych::Options options;
  bool session = false, twice = false, open = false;
  std::optional<triptych::Milliseconds> timeout, cancel;
};

void Run(const std::string& address, const std::string& kind, const Flags& flags) {
  const auto timeout = flags.timeout;
  triptych::Client client(address, flags.options);
  if (flags.session) {
    const auto session = client.OpenSession();
    if (kind == "chat") {
      session->Start(FromStdin<v1::ChatRequest>());
    } else {
      const auto request = FromStdin<v1::GenerateRequest>();
      for (int i = 0; i < 1 + flags.twice; ++i) session->Start(request);
    }
    Relay(session.get(), 1 + flags.twice, flags.open);
  } else if (kind == "chat") {
    Relay(client.Chat(FromStdin<v1::ChatRequest>(), timeout), flags.cancel);
  } else {
    Relay(client.Generate(FromStdin<v1::GenerateRequest>(), timeout), flags.cancel);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  for (int i = 3; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto milliseconds = [&] { return triptych::Milliseconds(std::stoi(argv[++i])); };
    if (flag == "--session") flags.session = true;
    if (flag == "--twice") flags.twice = true;
    if (flag == "--open") flags.open = true;
    if (flag == "--no-resume") flags.options.resume = false;
    if (flag == "--timeout") flags.timeout = milliseconds();
    if (flag == "--cancel") flags.cancel = milliseconds();
    if (flag == "--first-wait") flags.options.retry.first_wait = milliseconds();
    if (flag == "--longest-wait") flags.options.retry.longest_wait = milliseconds();
  }
  try {
    Run(argv[1], argv[2], flags);
  } catch (const triptych::Error& error) {
    const bool mismatch = dynamic_cast<const triptych::ResumeMismatch*>(&error) != nullptr;
    std::cerr << error.code() << (mismatch ? " mismatch " : " ") << error.what();
    return 1;
  }
  return 0;
}
