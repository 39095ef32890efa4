// Clusters of vectors on their way from a device to their distances: reads in a deep queue, up to a
// window of bytes; each cluster is checked and measured where it lies, as it arrives, by the
// stream's own threads and by those that ask. What is kept of a cluster is its reply, a distance
// and an id for each vector: the bytes it was made of go at once.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/distances/distances.hpp"
#include "io/engine.hpp"
#include "worker_pool.hpp"

namespace espnx::device {

// One entry of a reply, as it lies in memory.
struct VectorDistance {
  float distance;
  int32_t id;
};

// A query, and the clusters whose vectors are measured from it. An entry of a cluster is an int32
// id and a vector.
struct ClusterRequest {
  DistanceQuery query;
  int64_t file;
  std::string path;               // of the file, for messages
  std::vector<int64_t> clusters;  // their numbers, for messages
  std::vector<int64_t> offset_bytes, n_vectors, crc32c;
  double deadline_s = 30;  // of each read
};

// What was asked for, and what has come of it. Lives as long as somebody holds it.
struct ClusterTicket;

// Every call may come from any thread at any time.
class ClusterStream {
 public:
  using Ticket = std::shared_ptr<ClusterTicket>;

  // `window_bytes`: of clusters under way, of all tickets; each has one batch at least.
  // `max_workers`: threads that measure, beside those that ask.
  ClusterStream(std::shared_ptr<io::Engine> engine, int64_t window_bytes, int max_workers);
  ~ClusterStream();
  ClusterStream(const ClusterStream&) = delete;
  ClusterStream& operator=(const ClusterStream&) = delete;

  // Starts the reads. Throws FailureError: what the engine refuses.
  Ticket push(ClusterRequest request);

  // Waits up to `wait_ns` for `at_least` clusters more than were handed out so far, and appends
  // their places among those asked for, in the order in which they were measured. True once all
  // have been handed out. Throws FailureError: the first failure of the reads, a cluster that is
  // damaged, the deadline, forget().
  bool next(ClusterTicket& ticket, int64_t at_least, int64_t wait_ns, std::vector<int64_t>& items);

  // Of all clusters asked for, one after the other; those of clusters that next() has handed out
  // are there.
  static const std::vector<VectorDistance>& replies(const ClusterTicket& ticket);

  struct Costs {
    int64_t bytes_asked = 0, bytes_moved = 0, requests = 0;
    double waiting_s = 0, computing_s = 0;  // of all threads
  };
  static Costs costs(ClusterTicket& ticket);

  // Ends the reads of one ticket, or of all: next() that is under way, or comes later, throws
  // FailureError (cancelled), unless all of the ticket's clusters were measured.
  void forget(ClusterTicket& ticket);
  void clear();

  Costs stats();

  bool in_own_process() const { return engine_->in_own_process(); }

 private:
  struct Batch;
  friend struct ClusterTicket;

  void submit_more(ClusterTicket& ticket);  // under the ticket's mutex
  void step(ClusterTicket& ticket, int64_t wait_ns);
  void measure(ClusterTicket& ticket, const std::shared_ptr<Batch>& batch,
               std::unique_lock<std::mutex>& lock);
  void fetch(ClusterTicket& ticket, const std::shared_ptr<Batch>& batch, int64_t wait_ns,
             std::unique_lock<std::mutex>& lock);
  void end_batch(ClusterTicket& ticket, Batch& batch);  // under the ticket's mutex
  void fail(ClusterTicket& ticket, std::exception_ptr error);
  void start_workers(const Ticket& ticket, int64_t total_bytes);
  void work(const std::weak_ptr<ClusterTicket>& wanted);

  std::shared_ptr<io::Engine> engine_;
  const int64_t window_bytes_;
  std::mutex mutex_;  // taken after a ticket's, never before
  std::vector<std::weak_ptr<ClusterTicket>> live_;
  int64_t under_way_bytes_ = 0;
  Costs stats_;
  WorkerPool<std::weak_ptr<ClusterTicket>> workers_;  // in line a ticket for each helper
};

}  // namespace espnx::device
