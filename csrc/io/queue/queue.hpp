// An asynchronous I/O queue: the one thing that differs between io_uring, a thread pool, memory and
// an injected fault. Used by a single thread (the engine's I/O thread), except wake().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/file.hpp"

namespace espnx::io {

enum class Op : uint8_t { read, write };

struct Request {
  Op op;
  const File* file;
  int64_t offset;
  char* data;
  int64_t size;
  uint64_t tag;
};

struct Completion {
  uint64_t tag;
  int64_t result;  // bytes moved, or -errno
};

class Queue {
 public:
  virtual ~Queue() = default;

  // Hands one request over. The caller never has more than `depth` outstanding. Throws FailureError
  // when the queue itself is broken.
  virtual void submit(const Request& request) = 0;

  // Appends completions to `out`: returns when at least `at_least` are there, on wake(), or after
  // `timeout_ns` (negative: no limit).
  virtual void wait(std::vector<Completion>& out, size_t at_least, int64_t timeout_ns) = 0;

  // Makes a running or the next wait() return early. Any thread.
  virtual void wake() = 0;

  // Asks for a request to end early; it still completes (perhaps with -ECANCELED), or never does.
  virtual void cancel(uint64_t tag) = 0;
};

// Null where the kernel has no (or forbids) io_uring; `reason` then says why.
std::unique_ptr<Queue> make_uring_queue(unsigned depth, std::string& reason);
std::unique_ptr<Queue> make_posix_queue(unsigned threads);
std::unique_ptr<Queue> make_inline_queue();

// The queue of that name: uring, posix, memory, or auto, the first of the former two that can be
// had. Belongs to the thread that calls. `effective`: which one it is; `reason`: why auto is not
// io_uring. Throws FailureError: unavailable, invalid.
std::unique_ptr<Queue> make_queue(const std::string& path, unsigned depth, unsigned threads,
                                  std::string& effective, std::string& reason);

}  // namespace espnx::io
