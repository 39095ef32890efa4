// Records on their way from a device to their scores: reads that run ahead of whoever will ask for
// the scores, up to a window of bytes; each batch of arrivals is checked and scored where it lies,
// in the order of arrival. What nobody waits for yet is scored by the stream's own threads, what is
// urgent by the thread that asks.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "io/engine.hpp"
#include "record_score.hpp"
#include "worker_pool.hpp"

namespace espnx::device {

// Records of one kind that a device keeps: where each lies, and what they have in common.
struct KeptRecords {
  RecordRules rules;
  const uint16_t* n_tokens;           // by record number
  int64_t total;                      // of them
  const int64_t* group_offset_bytes;  // one for every 64 records
  std::vector<int64_t> segment_begin;
  std::vector<int64_t> files;  // of each segment
  std::vector<std::shared_ptr<void>> keeps_alive;
};

// A query with memory of its own: it outlives the call that asks.
struct OwnQuery {
  std::vector<float> tokens, cls;
  int64_t n_tokens;
  float cls_weight;
};

struct RecordRequest {
  std::shared_ptr<const KeptRecords> kept;
  std::vector<int64_t> numbers;  // of records, each in [0, total)
  std::vector<OwnQuery> queries;
  std::vector<int64_t> pair_item,
      pair_query;          // ordered by item; both empty: the one query wants every record
  bool is_urgent = false;  // ahead of all else; scored by the thread that calls next()
  int64_t gap_bytes = 0;
  double deadline_s = 30;
  int max_threads = 1;  // of a scoring call
};

// What was asked for, and what has come of it. Lives as long as somebody holds it.
struct RecordTicket;

// Every call may come from any thread at any time.
class RecordStream {
 public:
  using Ticket = std::shared_ptr<RecordTicket>;

  // `window_bytes`: of records that are read before anybody waits for them. `max_workers`: threads
  // that score those.
  RecordStream(std::shared_ptr<io::Engine> engine, int64_t window_bytes, int max_workers);
  ~RecordStream();
  RecordStream(const RecordStream&) = delete;
  RecordStream& operator=(const RecordStream&) = delete;

  // Starts the reads, or puts them in line where the window is full.
  Ticket push(RecordRequest request);

  // Waits up to `wait_ns` for `at_least` records more than were handed out so far to be checked and
  // scored, and appends their places among the numbers asked for. True once every record has been
  // handed out, or one is damaged. Throws FailureError: the first failure of the reads, the
  // deadline, forget().
  bool next(RecordTicket& ticket, int64_t at_least, int64_t wait_ns, std::vector<int64_t>& items);

  // Scores of the pairs asked for (of every record, without pairs). What next() has handed out is
  // there.
  static const std::vector<float>& scores(const RecordTicket& ticket);
  // The record that is not what it must be, as a place among the numbers; -1: none so far.
  static int64_t damaged(const RecordTicket& ticket);
  // Scores more pairs, ordered by item, of a ticket that is finished, in the caller's thread.
  static std::vector<float> score_more(RecordTicket& ticket, const std::vector<int64_t>& pair_item,
                                       const std::vector<int64_t>& pair_query);

  // The reads of a ticket; null while it waits for the window.
  static std::shared_ptr<io::Transfer> transfer(RecordTicket& ticket);

  struct Costs {
    int64_t bytes_asked = 0, bytes_moved = 0, requests = 0;
    double waiting_s = 0;    // of threads that called next()
    double computing_s = 0;  // of all threads
    double age_s = 0;        // since the last record was scored; negative: it has not been
  };
  Costs costs(RecordTicket& ticket);

  // Ends the reads of one ticket, or of all: next() that is under way, or comes later, throws
  // FailureError (cancelled), unless all of the ticket's records were scored.
  void forget(RecordTicket& ticket);
  void clear();

  struct Stats {
    int64_t bytes_asked = 0, bytes_moved = 0, requests = 0;
    double waiting_s = 0, computing_s = 0;
  };
  Stats stats();

  bool in_own_process() const { return engine_->in_own_process(); }

 private:
  void submit(const Ticket& ticket);  // under mutex_
  void submit_now(RecordTicket& ticket);
  void pump();  // under mutex_
  void step(RecordTicket& ticket, int64_t at_least, int64_t wait_ns, bool is_asked_for);
  void end(RecordTicket& ticket);
  void work(const Ticket& ticket);

  std::shared_ptr<io::Engine> engine_;
  const int64_t window_bytes_;
  std::mutex mutex_;
  std::deque<Ticket> line_;  // not submitted: the window is full
  std::vector<std::weak_ptr<RecordTicket>> live_;
  int64_t ahead_bytes_ = 0;
  Stats stats_;
  WorkerPool<Ticket> workers_;  // scores what is submitted and not urgent
};

}  // namespace espnx::device
