// Stored rows on their way from a device to attention: reads run ahead in the order in which layers
// will be asked for, up to a window of bytes, while whoever needs the rows of the layer at the
// front checks them and computes on them as they arrive. Rows do not depend on the query, so the
// device never waits for the layers between (HILOS, section 4.1; the depth is what this code adds).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu/attention/attention.hpp"
#include "io/engine.hpp"
#include "row_plan.hpp"

namespace espnx::device {

// The rows of one layer that attention will ask for.
struct RowRequest {
  int64_t ticket = 0;
  RowGeometry geometry;
  std::vector<RowSegment> segments;
  int64_t unit_bytes = 0;                          // of a read, at most
  std::vector<std::shared_ptr<void>> keeps_alive;  // what the segments' checksums lie in
};

// The queries of one layer: for each (sequence, KV head) the query heads that look at it, all
// positions.
struct RowQueries {
  const float* q;  // [sequences, heads, n, d], multiplied by the softmax scale
  int64_t n_sequences, n_heads, n, d, dv;
  const int64_t* last_position;  // [n] or nullptr, of every (sequence, head)
  const int64_t* first_visible;  // [sequences] or nullptr: rows before that position are padding
  const uint8_t* visible;        // [sequences, visible_stride] or nullptr
  int64_t visible_stride;
  const int64_t* position;  // [n], where there are a window or slopes
  int64_t window;  // 0: none; otherwise a query sees so many positions, its own the last of them
  float soft_cap;  // 0: none
  const float* slopes;  // [heads, n] or nullptr
  float *o, *m, *l;     // states, [sequences, heads, n, (dv)]
};

// The state of one (sequence, head) among those of all of them.
inline AttentionState state_of_group(const RowQueries& queries, const AttentionState& states,
                                     int64_t sequence, int64_t head) {
  const int64_t before = (sequence * queries.n_heads + head) * queries.n;
  return {states.o + before * queries.dv, states.m + before, states.l + before};
}

// Folds rows of one (sequence, head) into its state. What hides rows comes from the queries.
// `pages`: what the pages of the rows weigh, or nullptr.
void attend_group(const RowQueries& queries, int64_t sequence, int64_t head, AttentionRows rows,
                  const AttentionState& state, const PageSums* pages = nullptr);

// The rows of a piece of a read.
AttentionRows rows_of(const RowGeometry& geometry, const RowPiece& piece, const char* memory);

// clear(), front(), reach() and stats() may be called by any thread at any time; the other calls by
// one thread at a time.
class RowStream {
 public:
  // `window_bytes`: what may be read ahead of its use. `deadline_s`: of each read.
  RowStream(std::shared_ptr<io::Engine> engine, int64_t window_bytes, double deadline_s);
  ~RowStream();

  // Puts the reads of a layer at the end of the line.
  int64_t push(RowRequest request);

  // Folds the rows of the ticket at the front into the queries' states with `n_threads` threads.
  // Throws FailureError (a checksum that does not fit among them); the ticket is gone then, and the
  // states are invalid. `interrupted` is asked every now and then, in the caller's thread.
  void attend(int64_t ticket, const RowQueries& queries, int n_threads,
              const std::function<bool()>& interrupted);

  // Shows the reads of the ticket at the front, checked, in `n_threads` threads numbered from 0,
  // the caller's. The memory is invalid afterwards. `is_over`: another thread has failed, and no
  // read comes any more; throws FailureError where the caller is interrupted.
  using See = std::function<void(const RowPlan&, const RowUnit&, const char*, int thread,
                                 const std::function<bool()>& is_over)>;
  void visit(int64_t ticket, const See& see, int n_threads,
             const std::function<bool()>& interrupted);

  // Forgets everything that was pushed. Any thread, at any time: attend() and visit() that are
  // under way in another one throw FailureError (cancelled), if they have not all of their rows
  // yet.
  void clear();

  // The ticket whose rows come next, or -1.
  int64_t front();

  // From here on so many bytes may be read ahead of their use, but no fewer than at first; what is
  // under way beyond that stays. Where there is no memory for so many, the window is the first one
  // again.
  void reach(int64_t window_bytes);

  struct Stats {
    int64_t bytes_asked = 0, bytes_moved = 0, read_requests = 0;
    // Read, and nobody has asked for them yet; and the most that were read or on their way at once.
    int64_t ahead_bytes = 0, most_ahead_bytes = 0;
    double waiting_s = 0, computing_s = 0;
  };
  Stats stats();

 private:
  struct Reading;  // a request with its reads in flight
  using Arrived = std::function<void(const Reading&, const RowUnit&, const char*, int thread)>;

  void widen(int64_t window_bytes);            // under mutex_
  void pump();                                 // under mutex_
  void fill();                                 // under mutex_; the window. Throws bad_alloc
  void plan(Reading& reading);                 // under mutex_; once
  void submit(Reading& reading, size_t unit);  // under mutex_
  std::shared_ptr<Reading> take_front(int64_t ticket);
  bool is_forgotten(const Reading& reading);
  void consume(Reading& reading, int n_threads, const Arrived& arrived,
               const std::function<bool()>& interrupted);
  void work(Reading& reading, int thread, const Arrived& arrived,
            const std::function<bool()>* interrupted);
  void check(const Reading& reading, const RowUnit& unit, const char* memory) const;

  std::shared_ptr<io::Engine> engine_;
  const int64_t first_window_bytes_;
  int64_t window_bytes_;
  double deadline_s_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Reading>> line_;
  int64_t ahead_bytes_ = 0, next_ticket_ = 0;
  Stats stats_;
};

}  // namespace espnx::device
