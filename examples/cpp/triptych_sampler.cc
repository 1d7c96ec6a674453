#include "triptych_sampler.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "triptych/v1/sampler.pb.h"
#include "triptych_layout.h"

namespace triptych {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr size_t kMaxPacketBytes = 65536;
constexpr Milliseconds kFirstWait{20};  // before a lease is claimed again; then twice as long
constexpr Milliseconds kLongestWait{500};
constexpr Clock::duration kAnswerTimeout = Milliseconds(10000);  // for the engine's word on a lease

[[noreturn]] void Fail(const std::string& what, bool retryable = false) {
  throw SamplerError(what + ": " + std::strerror(errno), retryable);
}

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

// The leased rows: a logits ring of one row a slot, mapped read-only.
class Rows {
 public:
  Rows(const Descriptor& fd, const v1::LeaseOffer& offer) {
    struct stat facts;
    if (fstat(fd.get(), &facts) != 0) Fail("fstat");
    const int seals = fcntl(fd.get(), F_GET_SEALS);
    // Unsealed, it could be cut short under us, which is a SIGBUS.
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) throw SamplerError("the rows are not sealed");
    size_ = static_cast<size_t>(facts.st_size);
    if (size_ < TRIPTYCH_HEADER_BYTES) throw SamplerError("the rows have no header");
    memory_ = mmap(nullptr, size_, PROT_READ, MAP_SHARED | MAP_POPULATE, fd.get(), 0);
    if (memory_ == MAP_FAILED) Fail("mmap");
    if (!Checked(offer)) {
      munmap(memory_, size_);
      throw SamplerError("the rows are not laid out as this program was built for");
    }
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  ~Rows() { munmap(memory_, size_); }

  // Null for a row that is not there, or that holds the logits of another ticket by now.
  const float* Logits(uint32_t row, uint64_t ticket) const {
    if (row >= ring().num_slots) return nullptr;
    const char* slot = static_cast<const char*>(memory_) + triptych_slot_offset(&ring(), row);
    const auto* header = reinterpret_cast<const triptych_logits_header*>(slot);
    if (header->step_id != ticket || header->num_rows != 1) return nullptr;
    return reinterpret_cast<const float*>(slot + triptych_logits_offset());
  }

 private:
  const triptych_ring_header& ring() const {
    return *static_cast<const triptych_ring_header*>(memory_);
  }

  bool Checked(const v1::LeaseOffer& offer) const {
    const uint64_t row_bytes =
        triptych_logits_offset() + sizeof(float) * uint64_t{offer.vocabulary_size()};
    return ring().magic == TRIPTYCH_MAGIC && ring().layout_version == TRIPTYCH_LAYOUT_VERSION &&
           ring().kind == TRIPTYCH_KIND_LOGITS && ring().epoch == offer.epoch() &&
           ring().num_slots == offer.num_rows() && ring().max_logits == 1 &&
           ring().vocabulary_size == offer.vocabulary_size() &&
           offer.sampleable_vocabulary() <= offer.vocabulary_size() &&
           ring().slot_bytes == triptych_aligned(row_bytes) && ring().total_bytes == size_ &&
           triptych_slot_offset(&ring(), ring().num_slots) == size_;
  }

  void* memory_;
  size_t size_;
};

Descriptor Connect(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) throw SamplerError("too long a path: " + path);
  path.copy(address.sun_path, path.size());
  Descriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) Fail("socket");
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    // Not there, nobody behind it, or too many before us: an engine may be starting.
    Fail(path, errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN);
  }
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) Fail("SO_PEERCRED");
  if (peer.uid != geteuid()) throw SamplerError(path + " is another user's");
  return fd;
}

// Waits for `events` on `fd`; false when `stop` is readable, or nothing came in time.
bool Wait(int fd, short events, int stop, std::optional<Clock::duration> timeout = std::nullopt) {
  pollfd polled[] = {{stop, POLLIN, 0}, {fd, events, 0}};
  const int timeout_ms =
      timeout ? static_cast<int>(std::chrono::duration_cast<Milliseconds>(*timeout).count()) : -1;
  int ready;
  do {
    ready = poll(polled, 2, timeout_ms);
  } while (ready < 0 && errno == EINTR);
  if (ready < 0) Fail("poll");
  return ready > 0 && polled[0].revents == 0;
}

uint64_t RandomLease() {
  std::random_device random;
  uint64_t lease = 0;
  while (lease == 0) lease = uint64_t{random()} << 32 | random();
  return lease;
}

int StopEvent() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) Fail("eventfd");
  return fd;
}

}  // namespace

// One connection that has been granted the lease.
class Sampler::Connection {
 public:
  // Throws SamplerError, retryable too when stopped meanwhile.
  Connection(const std::string& path, const v1::LeaseRequest& request, int stop,
             Clock::duration patience)
      : stop_(stop), socket_(Connect(path)), packet_(kMaxPacketBytes) {
    v1::SamplerMessage message;
    *message.mutable_lease() = request;
    Descriptor memory;
    v1::SamplerReply reply;
    if (!Send(message) || !Wait(socket_.get(), POLLIN, stop_, patience) ||
        !Receive(&reply, &memory)) {
      throw SamplerError("the engine did not answer", true);
    }
    if (reply.has_refused()) {
      throw SamplerError("the lease was refused: " + reply.refused().reason(),
                         reply.refused().retry());
    }
    if (!reply.has_offer() || !memory) throw SamplerError("the engine did not offer rows");
    sampleable_ = reply.offer().sampleable_vocabulary();
    rows_ = std::make_unique<Rows>(memory, reply.offer());
  }

  // Answers packets until the connection ends or Stop is called.
  void Serve(const Draw& draw) {
    v1::SamplerReply reply;
    v1::SamplerMessage answer;
    while (Wait(socket_.get(), POLLIN, stop_) && Receive(&reply, nullptr)) {
      auto* drawn = answer.mutable_drawn();
      drawn->clear_tokens();
      for (const auto& ready : reply.ready().rows()) {
        const float* logits = rows_->Logits(ready.row(), ready.ticket());
        if (logits == nullptr) continue;  // its request has ended meanwhile
        auto* token = drawn->add_tokens();
        token->set_row(ready.row());
        token->set_ticket(ready.ticket());
        token->set_token_id(draw({logits, sampleable_, ready.tag(), ready.position()}));
      }
      if (drawn->tokens_size() > 0 && !Send(answer)) return;
    }
  }

 private:
  // False when the connection has ended, or Stop was called while nobody read.
  bool Send(const v1::SamplerMessage& message) {
    message.SerializeToString(&sent_);
    while (send(socket_.get(), sent_.data(), sent_.size(), MSG_NOSIGNAL) < 0) {
      if (errno == EPIPE || errno == ECONNRESET) return false;
      if (errno == EAGAIN && !Wait(socket_.get(), POLLOUT, stop_)) return false;
      if (errno != EAGAIN && errno != EINTR) Fail("send");
    }
    return true;
  }

  // One packet, which is there to be read; false when the connection has ended. Without `memory`,
  // descriptors are refused by the kernel: there is no room for them.
  bool Receive(v1::SamplerReply* reply, Descriptor* memory) {
    iovec bytes{packet_.data(), packet_.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr header{};
    header.msg_iov = &bytes;
    header.msg_iovlen = 1;
    if (memory != nullptr) {
      header.msg_control = control;
      header.msg_controllen = CMSG_LEN(sizeof(int));  // CMSG_SPACE would let in two
    }
    ssize_t size;
    do {
      size = recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC);
    } while (size < 0 && errno == EINTR);
    if (size == 0 || (size < 0 && errno == ECONNRESET)) return false;
    if (size < 0) Fail("recvmsg");
    if (memory != nullptr) *memory = Received(&header);
    if ((header.msg_flags & MSG_TRUNC) != 0 ||
        !reply->ParseFromArray(packet_.data(), static_cast<int>(size))) {
      throw SamplerError("the engine sent what is no message");
    }
    return true;
  }

  static Descriptor Received(msghdr* header) {
    const cmsghdr* first = CMSG_FIRSTHDR(header);
    if (first == nullptr || first->cmsg_level != SOL_SOCKET || first->cmsg_type != SCM_RIGHTS) {
      return Descriptor();
    }
    int fd;
    std::memcpy(&fd, CMSG_DATA(first), sizeof fd);
    return Descriptor(fd);
  }

  const int stop_;
  const Descriptor socket_;
  std::vector<char> packet_;
  std::string sent_;
  size_t sampleable_ = 0;
  std::unique_ptr<Rows> rows_;
};

Sampler::Sampler(const std::string& run_dir, Draw draw, SamplerOptions options)
    : path_(run_dir + "/samplers.sock"),
      draw_(std::move(draw)),
      options_(options),
      lease_(RandomLease()),
      stop_event_(StopEvent()) {
  try {
    struct stat folder;
    if (stat(run_dir.c_str(), &folder) != 0) Fail(run_dir);
    connection_ = Claim(Clock::now() + options_.timeout);
  } catch (...) {
    close(stop_event_);
    throw;
  }
}

Sampler::~Sampler() {
  Stop();
  if (thread_.joinable()) thread_.join();
  close(stop_event_);
}

void Sampler::Apply(v1::SamplingParams* params, uint64_t tag) const {
  params->mutable_external_sampler()->set_lease(lease_);
  params->mutable_external_sampler()->set_tag(tag);
}

std::unique_ptr<Sampler::Connection> Sampler::Claim(Clock::time_point deadline) const {
  v1::LeaseRequest request;
  request.set_layout_version(TRIPTYCH_LAYOUT_VERSION);
  request.set_lease(lease_);
  request.set_num_rows(options_.num_rows);
  for (Milliseconds wait = kFirstWait; !stopped_; wait = std::min(2 * wait, kLongestWait)) {
    try {
      const auto patience =
          std::clamp<Clock::duration>(deadline - Clock::now(), wait, kAnswerTimeout);
      return std::make_unique<Connection>(path_, request, stop_event_, patience);
    } catch (const SamplerError& error) {
      if (!error.retryable() || Clock::now() + wait > deadline) throw;
    }
    pollfd stop{stop_event_, POLLIN, 0};
    poll(&stop, 1, static_cast<int>(wait.count()));
  }
  return nullptr;
}

void Sampler::Serve() {
  auto connection = std::move(connection_);
  while (connection != nullptr && !stopped_) {
    connection->Serve(draw_);
    connection.reset();
    connection = Claim(Clock::time_point::max());
  }
}

void Sampler::Start() {
  thread_ = std::thread([this] {
    try {
      Serve();
    } catch (...) {
      failure_ = std::current_exception();
    }
  });
}

void Sampler::Join() {
  thread_.join();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Sampler::Stop() {
  stopped_ = true;
  eventfd_write(stop_event_, 1);
}

}  // namespace triptych
