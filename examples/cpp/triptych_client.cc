#include "triptych_client.h"

#include <algorithm>
#include <random>
#include <thread>
#include <utility>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace triptych {
namespace {

Deadline DeadlineOf(std::optional<Milliseconds> timeout) {
  if (!timeout) return std::nullopt;
  return std::chrono::system_clock::now() + *timeout;
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const Options& options) {
  grpc::ChannelArguments arguments;
  // Calls take turns over all addresses of a dns:/// name: a tokenizer process each.
  arguments.SetLoadBalancingPolicyName("round_robin");
  const int keepalive = static_cast<int>(options.keepalive.count());
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive);
  // gRPC's own pace (1 s, then up to 2 minutes) would fail all attempts of one policy.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  // So long a connection may take to be made; gRPC's own 20 s would be spent on a host that is
  // gone.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  if (!options.authority.empty()) {
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, options.authority);
  }
  return grpc::CreateCustomChannel(address, options.credentials, arguments);
}

uint64_t RandomSeed() {
  std::random_device random;  // 32 bits at a time
  return uint64_t{random()} << 32 | random();
}

// So that the same request has the same answer.
void SetSeed(v1::SamplingParams* params) {
  if (!params->has_seed() && !params->has_beam()) params->set_seed(RandomSeed());
}

// What to send so long after the first attempt: its time-out counts from its arrival.
template <class Request>
Request Later(Request request, Milliseconds spent) {
  if (!request.has_timeout_ms() || spent.count() == 0) return request;
  if (spent.count() >= request.timeout_ms()) {
    throw Error(grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "timeout_ms passed"));
  }
  request.set_timeout_ms(request.timeout_ms() - spent.count());
  return request;
}

grpc::Status SessionEnded() { return {grpc::StatusCode::UNAVAILABLE, "the session has ended"}; }

void SetError(v1::SessionEvent* event, const Error& error) {
  event->mutable_error()->set_code(error.code());
  event->mutable_error()->set_message(error.what());
}

}  // namespace

Error::Error(const grpc::Status& status)
    : Error(status.error_code(), status.error_message(), status.error_details()) {}

Error::Error(const v1::SessionError& error)
    : Error(static_cast<grpc::StatusCode>(error.code()), error.message(), error.status()) {}

Error::Error(grpc::StatusCode code, const std::string& message, const std::string& details)
    : std::runtime_error(message), code_(code) {
  google::rpc::Status status;
  if (!status.ParseFromString(details)) return;  // a proxy's: its code still says what to do
  for (const auto& detail : status.details()) {
    google::rpc::RetryInfo retry;
    google::rpc::BadRequest bad;
    if (detail.UnpackTo(&retry)) {
      retry_after_ = Milliseconds(retry.retry_delay().seconds() * 1000 +
                                  retry.retry_delay().nanos() / 1000000);
    } else if (detail.UnpackTo(&bad) && bad.field_violations_size() > 0) {
      field_ = bad.field_violations(0).field();
    }
  }
}

bool Error::retryable() const {
  return code_ == grpc::StatusCode::UNAVAILABLE ||
         (code_ == grpc::StatusCode::RESOURCE_EXHAUSTED && retry_after_.has_value());
}

std::optional<Milliseconds> RetryPolicy::Wait(int failures, const Error& error) const {
  const Milliseconds asked = error.retry_after().value_or(Milliseconds(0));
  if (!error.retryable() || failures >= attempts || asked > longest_retry_after) {
    return std::nullopt;
  }
  const auto doubled = first_wait.count() << std::min(failures - 1, 20);
  const auto backoff = std::min<int64_t>(longest_wait.count(), doubled);
  thread_local std::mt19937 random{std::random_device{}()};
  // Half of it at least, so that clients that failed together come again apart.
  return asked + Milliseconds(std::uniform_int_distribution<int64_t>(backoff / 2, backoff)(random));
}

grpc::Status CutOff() {
  return {grpc::StatusCode::UNAVAILABLE, "the stream ended before its answer did"};
}

void WaitToReconnect(grpc::Channel* channel, Milliseconds wait, const Error& error,
                     const std::atomic<bool>& cancelled) {
  constexpr Milliseconds kCancelNoticed{50};  // within this
  auto now = std::chrono::system_clock::now();
  bool was_down = false;
  // Not asleep: a channel connects again only while somebody waits for something of it.
  for (const auto end = now + wait; now < end && !cancelled;
       now = std::chrono::system_clock::now()) {
    const grpc_connectivity_state state = channel->GetState(true);
    was_down = was_down || state != GRPC_CHANNEL_READY;
    // What the engine itself asked for is waited for to the end.
    if (was_down && state == GRPC_CHANNEL_READY && !error.retry_after()) return;
    channel->WaitForStateChange(state, std::min(end, now + kCancelNoticed));
  }
}

Session::Session(std::shared_ptr<grpc::Channel> channel, v1::InferenceService::Stub* stub,
                 const Options& options)
    : channel_(std::move(channel)), stub_(stub), retry_(options.retry), resume_(options.resume) {
  Open();
}

Session::~Session() {
  context_->TryCancel();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    leaving_ = true;
  }
  due_changed_.notify_one();
  if (sender_.joinable()) sender_.join();
  if (finished_) return;
  for (v1::SessionResponse unread; stream_->Read(&unread);) {
  }
  stream_->Finish();
}

uint64_t Session::Start(const v1::GenerateRequest& request) {
  v1::SessionStart start;
  *start.mutable_generate() = request;
  if (resume_) SetSeed(start.mutable_generate()->mutable_sampling_params());
  return Start(std::move(start));
}

uint64_t Session::Start(const v1::ChatRequest& request) {
  v1::SessionStart start;
  *start.mutable_chat() = request;
  if (resume_) SetSeed(start.mutable_chat()->mutable_sampling_params());
  return Start(std::move(start));
}

uint64_t Session::Start(v1::SessionStart start) {
  std::lock_guard<std::mutex> writing(writing_);
  if (closed_ || finished_) throw Error(SessionEnded());
  start.set_id(++last_id_);
  v1::SessionRequest message;
  *message.mutable_start() = start;
  if (resume_) {
    std::lock_guard<std::mutex> lock(mutex_);
    running_[last_id_] = {std::move(start), Clock::now(), {}};
  }
  // Why it broke is for the reader, who goes on with what is running.
  if (!stream_->Write(message) && !resume_) throw Error(SessionEnded());
  return last_id_;
}

void Session::Cancel(uint64_t id) {
  v1::SessionRequest message;
  message.mutable_cancel()->set_id(id);
  std::lock_guard<std::mutex> writing(writing_);
  if (closed_ || finished_) throw Error(SessionEnded());
  if (resume_) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = running_.find(id);
    if (found != running_.end()) found->second.cancelled = true;
  }
  if (!stream_->Write(message) && !resume_) throw Error(SessionEnded());
}

void Session::Close() {
  std::lock_guard<std::mutex> writing(writing_);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!std::exchange(closed_, true) && !IsUnsent()) stream_->WritesDone();
}

bool Session::Next(v1::SessionEvent* event) {
  for (;;) {
    if (!events_.empty()) {
      *event = std::move(events_.front());
      events_.pop_front();
      if (!Take(event)) continue;
      failures_ = 0;
      return true;
    }
    if (finished_) return false;
    v1::SessionResponse response;
    if (stream_->Read(&response)) {
      for (auto& each : *response.mutable_events()) events_.push_back(std::move(each));
    } else {
      GoOn(stream_->Finish());
    }
  }
}

// Leaves in an event what is new of its request; false: nothing is.
bool Session::Take(v1::SessionEvent* event) {
  if (!resume_) return true;
  try {
    return TakeOutput(event);
  } catch (const ResumeMismatch& mismatch) {
    SetError(event, mismatch);
    std::lock_guard<std::mutex> lock(mutex_);
    running_.erase(event->id());  // what still comes of it is left out
    due_.emplace(Clock::now(), v1::SessionRequest())->second.mutable_cancel()->set_id(event->id());
    due_changed_.notify_one();
    return true;
  }
}

bool Session::TakeOutput(v1::SessionEvent* event) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = running_.find(event->id());
  if (found == running_.end()) return false;
  Running& running = found->second;
  bool is_new = true;
  if (event->has_output()) is_new = running.received.Take(event->mutable_output());
  if (event->has_chat()) is_new = running.received.Take(event->mutable_chat());
  if (event->has_error() && running.again) {
    // Of one that had been taken before, this is a part of the break.
    if (const auto wait = retry_.Wait(++running.failures, Error(event->error()))) {
      try {
        due_.emplace(Clock::now() + *wait, StartAgain(&running, *wait));
        due_changed_.notify_one();
        return false;
      } catch (const Error& error) {  // too late
        SetError(event, error);
      }
    }
  }
  if (is_new) running.failures = 0;
  if (event->has_error() || running.received.complete()) running_.erase(found);
  return is_new;
}

void Session::SendDue() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!leaving_) {
    if (due_.empty()) {
      due_changed_.wait(lock);
    } else if (const auto at = due_.begin()->first; at > Clock::now()) {
      due_changed_.wait_until(lock, at);
    } else {
      lock.unlock();
      SendNext();
      lock.lock();
    }
  }
}

void Session::SendNext() {
  std::lock_guard<std::mutex> writing(writing_);
  std::unique_lock<std::mutex> lock(mutex_);
  if (due_.empty() || due_.begin()->first > Clock::now())
    return;  // the stream has broken meanwhile
  const bool unsent = IsUnsent();
  const v1::SessionRequest message = std::move(due_.begin()->second);
  due_.erase(due_.begin());
  // A closed stream ends without, and what has not ended is started again on the next one.
  if (closed_ && !unsent) return;
  const bool last = unsent && !IsUnsent();
  const auto found = running_.find(message.start().id());
  const bool cancelled = found != running_.end() && found->second.cancelled;
  lock.unlock();
  // Where the stream has broken again, Next finds out.
  stream_->Write(message);
  if (cancelled) {
    v1::SessionRequest cancel;
    cancel.mutable_cancel()->set_id(message.start().id());
    stream_->Write(cancel);
  }
  if (closed_ && last) stream_->WritesDone();
}

// Whether starts are to be sent yet that were due when the stream was opened.
bool Session::IsUnsent() const { return !due_.empty() && due_.begin()->first <= opened_; }

void Session::Open() {
  stream_.reset();  // before the context that it is of
  context_ = std::make_unique<grpc::ClientContext>();
  stream_ = stub_->Session(context_.get());
  std::lock_guard<std::mutex> lock(mutex_);
  opened_ = Clock::now();
}

// After the stream has ended: opens another one where it should. Throws Error to give up.
void Session::GoOn(const grpc::Status& status) {
  std::unique_lock<std::mutex> writing(writing_);
  std::unique_lock<std::mutex> lock(mutex_);
  const bool idle = running_.empty();
  lock.unlock();
  finished_ = (status.ok() || (resume_ && closed_)) && idle;
  if (finished_) return;
  const Error error(status.ok() ? CutOff() : status);
  if (idle && Clock::now() - opened_ > retry_.longest_wait) failures_ = 0;  // a row ends here
  const auto wait = resume_ ? retry_.Wait(++failures_, error) : std::nullopt;
  if (!wait) {
    finished_ = true;
    throw error;
  }
  writing.unlock();
  WaitToReconnect(channel_.get(), *wait, error, finished_);
  writing.lock();
  Open();
  lock.lock();
  due_.clear();
  for (auto& [id, running] : running_) {
    try {
      due_.emplace(opened_, StartAgain(&running, Milliseconds(0)));
    } catch (const Error& error) {  // too late
      SetError(&events_.emplace_back(), error);
      events_.back().set_id(id);
    }
  }
  if (closed_ && due_.empty()) stream_->WritesDone();
  if (!sender_.joinable()) sender_ = std::thread(&Session::SendDue, this);
  due_changed_.notify_one();
}

// What starts a request again, so much later. Throws Error when that is too late.
v1::SessionRequest Session::StartAgain(Running* running, Milliseconds wait) {
  const v1::SessionStart& start = running->start;
  const auto spent = std::chrono::duration_cast<Milliseconds>(Clock::now() - running->began) + wait;
  running->again = true;
  running->received.Again();
  v1::SessionRequest message;
  message.mutable_start()->set_id(start.id());
  if (start.has_chat()) {
    *message.mutable_start()->mutable_chat() = Later(start.chat(), spent);
  } else {
    *message.mutable_start()->mutable_generate() = Later(start.generate(), spent);
  }
  return message;
}

Client::Client(const std::string& address, Options options)
    : options_(std::move(options)),
      channel_(MakeChannel(address, options_)),
      stub_(v1::InferenceService::NewStub(channel_)) {}

Stream<v1::GenerateResponse> Client::Generate(v1::GenerateRequest request,
                                              std::optional<Milliseconds> timeout) {
  if (options_.resume) SetSeed(request.mutable_sampling_params());
  auto opening = [stub = stub_.get(), request = std::move(request)](grpc::ClientContext* context,
                                                                    Milliseconds spent) {
    return stub->Generate(context, Later(request, spent));
  };
  return {channel_, std::move(opening), DeadlineOf(timeout), options_};
}

Stream<v1::ChatResponse> Client::Chat(v1::ChatRequest request,
                                      std::optional<Milliseconds> timeout) {
  if (options_.resume) SetSeed(request.mutable_sampling_params());
  auto opening = [stub = stub_.get(), request = std::move(request)](grpc::ClientContext* context,
                                                                    Milliseconds spent) {
    return stub->Chat(context, Later(request, spent));
  };
  return {channel_, std::move(opening), DeadlineOf(timeout), options_};
}

std::unique_ptr<Session> Client::OpenSession() {
  return std::make_unique<Session>(channel_, stub_.get(), options_);
}

std::vector<uint32_t> Client::Tokenize(const std::string& text) {
  v1::TokenizeRequest request;
  request.set_text(text);
  v1::TokenizeResponse response;
  grpc::ClientContext context;
  const grpc::Status status = stub_->Tokenize(&context, request, &response);
  if (!status.ok()) throw Error(status);
  return {response.token_ids().begin(), response.token_ids().end()};
}

}  // namespace triptych
