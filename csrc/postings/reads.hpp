// Reads on a queue of the calling thread's own: nobody has to be woken for them, which for a query alone takes longer
// than its reads. Buffers are the engine's, and so are paths, files and injected faults.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "io/engine.hpp"
#include "io/piece.hpp"

namespace espnx::postings {

struct Want {
  int64_t file, offset_bytes, size_bytes;
};

// What was asked for together.
struct ReadBatch {
  std::shared_ptr<io::Buffer> buffer;
  std::vector<int64_t> position_bytes;  // of each want in the buffer
  std::vector<std::shared_ptr<io::File>> files;
  int64_t left = 0;  // reads that have not ended
  int64_t requests = 0, bytes_asked = 0, bytes_moved = 0;

  const uint8_t* data(int64_t i) const { return reinterpret_cast<const uint8_t*>(buffer->data) + position_bytes[i]; }
};

// Of one thread, while a call lasts.
class Reads {
 public:
  explicit Reads(io::Engine& engine);
  // Ends what is under way. Memory that a device may still write to is never freed.
  ~Reads();
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;

  // What is started ahead of what is waited for goes to the kernel with the next wait(), and is read meanwhile.
  std::shared_ptr<ReadBatch> start(const std::vector<Want>& wants);
  // Until all of the batch is there: at most `deadline_s`, from now on. `interrupted` is asked about twenty times a
  // second. Throws FailureError.
  void wait(ReadBatch& batch, double deadline_s, const std::function<bool()>& interrupted);

 private:
  struct Read {
    std::shared_ptr<ReadBatch> batch;  // null: free
    io::Piece piece;
  };

  void add(const std::shared_ptr<ReadBatch>& batch, const Want& want, int64_t place);
  void pump();
  void submit(size_t tag);
  // Takes what has ended, at least so much of it or until the time is over, and submits what waits for room. False
  // where nothing had ended.
  bool take(size_t at_least, int64_t timeout_ns);
  void complete(const io::Completion& completion);

  io::Engine& engine_;
  std::unique_ptr<io::Queue> queue_;
  std::deque<Read> reads_;  // by tag
  std::deque<size_t> waiting_;
  std::vector<size_t> free_;
  std::vector<io::Completion> completions_;
  size_t in_flight_ = 0;
  bool is_unsent_ = false;  // reads that the queue has, and the kernel perhaps has not
};

}  // namespace espnx::postings
