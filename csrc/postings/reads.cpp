// See reads.hpp.
#include "reads.hpp"

#include <algorithm>
#include <utility>

namespace espnx::postings {
namespace {

constexpr unsigned kDepth = 128;
constexpr int64_t kSignalCheckNs = 50'000'000;
constexpr int64_t kRequestBytes = 960 << 10;
constexpr int64_t kGraceNs = 100'000'000;  // for reads that nobody waits for any more

int64_t align_up(int64_t bytes) {
  return (bytes + io::kBlockBytes - 1) / io::kBlockBytes * io::kBlockBytes;
}

// A thread's queue outlives its calls: making one takes as long as a few reads.
struct ThreadQueue {
  int64_t engine = -1;
  std::unique_ptr<io::Queue> queue;
};
ThreadQueue& thread_queue() {
  thread_local ThreadQueue own;
  return own;
}

std::unique_ptr<io::Queue> own_queue(io::Engine& engine) {
  ThreadQueue& own = thread_queue();
  return own.engine == engine.id() && own.queue ? std::move(own.queue)
                                                : engine.thread_queue(kDepth);
}

}  // namespace

Reads::Reads(io::Engine& engine) : engine_(engine), queue_(own_queue(engine), kGraceNs) {}

Reads::~Reads() {
  if (auto queue = queue_.release()) thread_queue() = {engine_.id(), std::move(queue)};
}

std::shared_ptr<ReadBatch> Reads::start(const std::vector<Want>& wants) {
  auto batch = std::make_shared<ReadBatch>();
  int64_t total = 0;
  std::vector<int64_t> places;
  for (const Want& want : wants) {
    const int64_t before = want.offset_bytes % io::kBlockBytes;
    places.push_back(total);
    batch->position_bytes.push_back(total + before);
    total += align_up(before + want.size_bytes);
    batch->bytes_asked += want.size_bytes;
  }
  batch->buffer = engine_.memory(std::max<int64_t>(total, 1));
  for (size_t i = 0; i < wants.size(); ++i) add(batch, wants[i], places[i]);
  pump();
  return batch;
}

void Reads::add(const std::shared_ptr<ReadBatch>& batch, const Want& want, int64_t place) {
  batch->files.push_back(engine_.file(want.file));
  io::File* file = batch->files.back().get();
  const int64_t end = want.offset_bytes + want.size_bytes;
  int64_t at = want.offset_bytes / io::kBlockBytes * io::kBlockBytes;
  while (at < end) {
    const int64_t size = std::min(kRequestBytes, align_up(end - at));
    waiting_.push_back(
        {batch,
         {io::Op::read, file, at, batch->buffer->data + place, size, std::min(size, end - at)}});
    ++batch->left;
    at += size, place += size;
  }
}

void Reads::pump() {
  while (queue_.in_flight() < kDepth && !waiting_.empty()) {
    Waiting next = std::move(waiting_.front());
    waiting_.pop_front();
    ++next.batch->requests;
    queue_.submit(std::move(next.batch), next.piece);
  }
}

bool Reads::take(size_t at_least, int64_t timeout_ns) {
  const size_t ended = queue_.wait(
      at_least, timeout_ns, [](Batch batch, io::Progress progress, int64_t moved_bytes) {
        batch->bytes_moved += moved_bytes;
        --batch->left;
        if (progress.step == io::Step::done) return;
        progress.failure.what =
            progress.failure.kind == io::Kind::truncated    ? "a file of posting lists ends early"
            : progress.failure.kind == io::Kind::short_read ? "reading a posting list stays short"
                                                            : "reading a posting list failed";
        throw io::FailureError(std::move(progress.failure));
      });
  pump();
  return ended > 0;
}

void Reads::wait(ReadBatch& batch, double deadline_s, const std::function<bool()>& interrupted) {
  // Nothing to wait for: without a call of the queue, reads ahead would begin only when the next
  // wait must be long. io_uring looks for ended ones, which make room, only where at least one is
  // asked for.
  if (batch.left == 0 && (queue_.has_unsent() || !waiting_.empty()))
    take(waiting_.empty() ? 0 : 1, 0);
  if (batch.left == 0) return;
  const auto deadline =
      io::Clock::now() +
      std::chrono::nanoseconds(static_cast<int64_t>(std::clamp(deadline_s, 0.0, 1e9) * 1e9));
  while (batch.left > 0) {
    const int64_t left_ns = std::chrono::nanoseconds(deadline - io::Clock::now()).count();
    const bool has_moved = take(1, std::clamp<int64_t>(left_ns, 0, kSignalCheckNs));
    if (!has_moved && left_ns <= 0) {  // looked at after the clock: what has arrived in time counts
      io::Failure failure;
      failure.kind = io::Kind::deadline;
      failure.what = "reading posting lists took too long";
      failure.path = batch.files.front()->path;
      throw io::FailureError(failure);
    }
    if (interrupted()) {
      io::Failure failure;
      failure.kind = io::Kind::cancelled;
      failure.what = "searching posting lists was interrupted";
      throw io::FailureError(failure);
    }
  }
}

}  // namespace espnx::postings
