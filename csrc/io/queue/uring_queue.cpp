// io_uring through its system calls: three calls and two shared rings need no library, and run
// where liburing is not installed. Flags are asked for from newest to oldest kernel. SQPOLL is
// never used: its kernel thread starves on machines with few cores.
#include "queue.hpp"

#if __has_include(<linux/io_uring.h>) && !defined(ESPNX_NO_URING)

#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>

#include "io/failure.hpp"

namespace espnx::io {
namespace {

constexpr uint64_t kWakeTag = ~uint64_t{0};
constexpr uint64_t kCancelTag = ~uint64_t{1};
constexpr unsigned kSetupSingleIssuer = 1U << 12;  // not in older headers
constexpr unsigned kSetupDeferTaskrun = 1U << 13;
constexpr unsigned kEnterExtArg = 1U << 3;
constexpr unsigned kFeatExtArg = 1U << 8;
constexpr int64_t kRoomWaitNs = 1'000'000;

struct Timespec64 {
  int64_t seconds;
  int64_t nanoseconds;
};

struct GetEventsArg {
  uint64_t signal_mask = 0;
  uint32_t signal_mask_size = 0;
  uint32_t padding = 0;
  uint64_t timespec = 0;
};

template <typename T>
T* at(void* base, uint32_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

class UringQueue final : public Queue {
 public:
  UringQueue(unsigned depth, std::string& reason) {
    if (!set_up(depth, reason)) return;
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0 || !map_rings()) {
      reason = std::string("io_uring rings cannot be mapped: ") + std::strerror(errno);
      return;
    }
    ready_ = true;
    arm_wake();
  }

  ~UringQueue() override {
    if (sqes_ != nullptr) munmap(sqes_, sqes_bytes_);
    if (completion_ring_ != nullptr && completion_ring_ != submission_ring_)
      munmap(completion_ring_, completion_bytes_);
    if (submission_ring_ != nullptr) munmap(submission_ring_, submission_bytes_);
    if (ring_fd_ >= 0) close(ring_fd_);
    if (wake_fd_ >= 0) close(wake_fd_);
  }

  bool ready() const { return ready_; }

  void submit(const Request& request) override {
    io_uring_sqe entry = {};
    entry.opcode = request.op == Op::read ? IORING_OP_READ : IORING_OP_WRITE;
    entry.fd = request.file->fd;
    entry.off = static_cast<uint64_t>(request.offset);
    entry.addr = reinterpret_cast<uint64_t>(request.data);
    entry.len = static_cast<uint32_t>(request.size);
    entry.user_data = request.tag;
    push(entry);
  }

  void wait(std::vector<Completion>& out, size_t at_least, int64_t timeout_ns) override {
    reap(out);  // before anything is submitted: completions that nobody has taken are what makes a
                // kernel refuse
    bool accepted = submit_backlog();
    const bool is_enough = out.size() >= at_least || woken_;
    if (accepted && is_enough) {
      if (queued_ > 0) enter(0, 0);  // submissions must not wait for the next call
    } else if (accepted) {
      accepted = enter(static_cast<unsigned>(at_least - out.size()), timeout_ns);
    }
    reap(out);
    // Under pressure a completion makes room. The caller comes back with everything that was not
    // taken.
    if (!accepted && !is_enough && out.size() < at_least && !woken_) {
      wait_for_room();
      reap(out);
    }
    if (woken_) {
      woken_ = false;
      drain_wake();
      arm_wake();
    }
  }

  void wake() override {
    const uint64_t one = 1;
    // A full counter (EAGAIN) is already a wake-up. Where the descriptor was closed under us, the
    // limit of a wait has to do.
    while (write(wake_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  void cancel(uint64_t tag) override {
    io_uring_sqe entry = {};
    entry.opcode = IORING_OP_ASYNC_CANCEL;
    entry.fd = -1;
    entry.addr = tag;
    entry.user_data = kCancelTag;
    push(entry);
  }

 private:
  bool set_up(unsigned depth, std::string& reason) {
    // Twice the depth: cancels and the wake-up poll share the submission ring with requests.
    unsigned entries = 64;
    while (entries < 2 * depth) entries *= 2;
    for (unsigned flags : {kSetupSingleIssuer | kSetupDeferTaskrun, kSetupSingleIssuer, 0U}) {
      params_ = {};
      params_.flags = flags | IORING_SETUP_CLAMP;
      ring_fd_ = static_cast<int>(syscall(SYS_io_uring_setup, entries, &params_));
      if (ring_fd_ >= 0 || errno != EINVAL) break;
    }
    if (ring_fd_ < 0) {
      reason = std::string("io_uring_setup: ") + std::strerror(errno);
      if (errno == EPERM)
        reason +=
            " (disabled by the sysctl kernel.io_uring_disabled, or by a container's seccomp "
            "profile)";
      return false;
    }
    if (!(params_.features & kFeatExtArg)) {
      reason =
          "this kernel's io_uring has no wait with a time limit (Linux 5.11 or newer is needed)";
      return false;
    }
    return true;
  }

  bool map_rings() {
    submission_bytes_ = params_.sq_off.array + params_.sq_entries * sizeof(uint32_t);
    completion_bytes_ = params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe);
    const bool single = params_.features & IORING_FEAT_SINGLE_MMAP;
    if (single)
      submission_bytes_ = completion_bytes_ = std::max(submission_bytes_, completion_bytes_);
    submission_ring_ = map(submission_bytes_, IORING_OFF_SQ_RING);
    completion_ring_ = single ? submission_ring_ : map(completion_bytes_, IORING_OFF_CQ_RING);
    sqes_bytes_ = params_.sq_entries * sizeof(io_uring_sqe);
    sqes_ = static_cast<io_uring_sqe*>(map(sqes_bytes_, IORING_OFF_SQES));
    if (submission_ring_ == nullptr || completion_ring_ == nullptr || sqes_ == nullptr)
      return false;
    sq_head_ = at<std::atomic<uint32_t>>(submission_ring_, params_.sq_off.head);
    sq_tail_ = at<std::atomic<uint32_t>>(submission_ring_, params_.sq_off.tail);
    sq_mask_ = *at<uint32_t>(submission_ring_, params_.sq_off.ring_mask);
    auto* array = at<uint32_t>(submission_ring_, params_.sq_off.array);
    for (uint32_t i = 0; i < params_.sq_entries; ++i) array[i] = i;
    cq_head_ = at<std::atomic<uint32_t>>(completion_ring_, params_.cq_off.head);
    cq_tail_ = at<std::atomic<uint32_t>>(completion_ring_, params_.cq_off.tail);
    cq_mask_ = *at<uint32_t>(completion_ring_, params_.cq_off.ring_mask);
    cqes_ = at<io_uring_cqe>(completion_ring_, params_.cq_off.cqes);
    return true;
  }

  void* map(size_t bytes, uint64_t what) {
    void* result = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_fd_,
                        static_cast<off_t>(what));
    return result == MAP_FAILED ? nullptr : result;
  }

  // Never waits: what finds the ring full goes into the backlog, which the next wait() submits.
  void push(const io_uring_sqe& entry) {
    if (!backlog_.empty() || queued_ == params_.sq_entries) {
      backlog_.push_back(entry);
    } else {
      put(entry);
    }
  }

  void put(const io_uring_sqe& entry) {
    const uint32_t tail = sq_tail_->load(std::memory_order_relaxed);
    sqes_[tail & sq_mask_] = entry;
    // The kernel reads entries only inside io_uring_enter (no SQPOLL).
    sq_tail_->store(tail + 1, std::memory_order_release);
    ++queued_;
  }

  // False where the kernel would not take a full ring.
  bool submit_backlog() {
    while (!backlog_.empty()) {
      if (queued_ == params_.sq_entries && !enter(0, 0)) return false;
      for (; !backlog_.empty() && queued_ < params_.sq_entries; backlog_.pop_front())
        put(backlog_.front());
    }
    return true;
  }

  // Submits what is queued, then waits for completions. False under pressure: the kernel has no
  // memory for requests, or too many completions, and took nothing; that passes, so it is never the
  // end of the queue.
  bool enter(unsigned at_least, int64_t timeout_ns) {
    const unsigned asked = queued_;
    const long result = call_enter(asked, at_least, timeout_ns);
    const int error = result < 0 ? errno : 0;
    queued_ = sq_tail_->load(std::memory_order_relaxed) - sq_head_->load(std::memory_order_acquire);
    if (error == 0 || error == ETIME || error == EINTR)
      return asked == 0 || queued_ < asked || error == EINTR;
    if (error == EAGAIN || error == EBUSY || error == ENOMEM) return false;
    fail(error);
  }

  // At most a moment, for a completion: nothing may be with the device, and pressure may come from
  // elsewhere.
  void wait_for_room() {
    if (call_enter(0, 1, kRoomWaitNs) < 0 && errno != ETIME) usleep(kRoomWaitNs / 1000);
  }

  long call_enter(unsigned to_submit, unsigned at_least, int64_t timeout_ns) {
    Timespec64 limit{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    GetEventsArg argument;
    if (at_least > 0 && timeout_ns >= 0) argument.timespec = reinterpret_cast<uint64_t>(&limit);
    return syscall(SYS_io_uring_enter, ring_fd_, to_submit, at_least,
                   IORING_ENTER_GETEVENTS | kEnterExtArg, &argument, sizeof argument);
  }

  [[noreturn]] static void fail(int error) {
    Failure failure;
    failure.kind = Kind::read;
    failure.error = error;
    failure.what = "io_uring_enter failed";
    throw FailureError(failure);
  }

  void reap(std::vector<Completion>& out) {
    uint32_t head = cq_head_->load(std::memory_order_relaxed);
    const uint32_t tail = cq_tail_->load(std::memory_order_acquire);
    for (; head != tail; ++head) {
      const io_uring_cqe& cqe = cqes_[head & cq_mask_];
      if (cqe.user_data == kWakeTag) {
        woken_ = true;
      } else if (cqe.user_data != kCancelTag) {
        out.push_back({cqe.user_data, cqe.res});
      }
    }
    cq_head_->store(head, std::memory_order_release);
  }

  void arm_wake() {
    io_uring_sqe entry = {};
    entry.opcode = IORING_OP_POLL_ADD;
    entry.fd = wake_fd_;
    entry.poll_events = POLLIN;
    entry.user_data = kWakeTag;
    push(entry);
  }

  void drain_wake() {
    uint64_t count;
    while (read(wake_fd_, &count, sizeof count) > 0) {
    }
  }

  io_uring_params params_ = {};
  int ring_fd_ = -1;
  int wake_fd_ = -1;
  bool ready_ = false;
  bool woken_ = false;
  unsigned queued_ = 0;               // filled entries the kernel has not been told of
  std::deque<io_uring_sqe> backlog_;  // entries that found the ring full
  void* submission_ring_ = nullptr;
  void* completion_ring_ = nullptr;
  io_uring_sqe* sqes_ = nullptr;
  size_t submission_bytes_ = 0, completion_bytes_ = 0, sqes_bytes_ = 0;
  std::atomic<uint32_t>*sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr,
  *cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
};

}  // namespace

std::unique_ptr<Queue> make_uring_queue(unsigned depth, std::string& reason) {
  auto queue = std::make_unique<UringQueue>(depth, reason);
  if (!queue->ready()) return nullptr;
  return queue;
}

}  // namespace espnx::io

#else

namespace espnx::io {

std::unique_ptr<Queue> make_uring_queue(unsigned, std::string& reason) {
  reason = "built without <linux/io_uring.h>";
  return nullptr;
}

}  // namespace espnx::io

#endif
