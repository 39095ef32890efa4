// Reads on a queue of the calling thread's own: nobody has to be woken for them, which for a query
// alone takes longer than its reads. Buffers are the engine's, and so are paths, files and injected
// faults.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "io/engine.hpp"
#include "io/queue/own_queue.hpp"

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

  const uint8_t* data(int64_t i) const {
    return reinterpret_cast<const uint8_t*>(buffer->data) + position_bytes[i];
  }
};

// Of one thread, while a call lasts.
class Reads {
 public:
  explicit Reads(io::Engine& engine);
  // Ends what is under way. Memory that a device may still write to is never freed.
  ~Reads();
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;

  // What is started ahead of what is waited for goes to the kernel with the next wait(), and is
  // read meanwhile.
  std::shared_ptr<ReadBatch> start(const std::vector<Want>& wants);
  // Until all of the batch is there: at most `deadline_s`, from now on. `interrupted` is asked
  // about twenty times a second. Throws FailureError.
  void wait(ReadBatch& batch, double deadline_s, const std::function<bool()>& interrupted);

 private:
  using Batch = std::shared_ptr<ReadBatch>;
  struct Waiting {
    Batch batch;
    io::Piece piece;
  };

  void add(const Batch& batch, const Want& want, int64_t place);
  void pump();
  // Takes what has ended, at least so much of it or until the time is over, and submits what waits
  // for room. False where nothing had ended.
  bool take(size_t at_least, int64_t timeout_ns);

  io::Engine& engine_;
  io::OwnQueue<Batch> queue_;
  std::deque<Waiting> waiting_;
};

}  // namespace espnx::postings
