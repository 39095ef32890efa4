// Queues without a wall clock: commands that pass parts of a machine one after another, walked in
// the order of their events. A part serves so many at a time, first come first served; a command
// takes its latency and its bytes at the part's rate, and may keep its place there until a later
// step of its way has ended, as a die keeps a page until the bus has taken it.
//
// Events of one moment happen in the order in which they were caused, so the same commands give the
// same times to the bit.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace espnx::simulate {

// What serves: a die, a bus, a processor, a link.
struct Part {
  int64_t places = 1;    // that it serves at a time
  double latency_s = 0;  // of each command
  double per_s = 0;      // bytes; 0: its bytes take no time
};

struct Step {
  int64_t part = 0;
  double amount = 0;  // bytes
  int64_t until = 0;  // the step of the same route with whose end the place is free again
};

using Route = std::vector<Step>;

// What is asked: each command has a route, a client and an arrival. A client's commands follow one
// another: each begins when the one before has ended, and not before its arrival. It may wait for
// others, too, all of which are before it: `after[after_first[i]]` up to `after_first[i + 1]`.
struct Commands {
  std::vector<int64_t> route;
  std::vector<int64_t> client;
  std::vector<double> at_s;          // empty: all at 0
  std::vector<int64_t> after_first;  // empty: none waits for others
  std::vector<int64_t> after;
};

// The account of a part over the window, in seconds times commands.
struct Account {
  double served_s = 0;   // in service
  double held_s = 0;     // of places that are taken, in service or until a later step
  double idle_s = 0;     // of the part: none of its places is taken
  double waited_s = 0;   // before it
  int64_t n_served = 0;  // whose service began within the window
};

struct Outcome {
  std::vector<double> begun_s, ended_s;  // of each command; -1: not within what was walked
  double begin_s = 0, end_s = 0;         // the window
  int64_t n_events = 0;
  std::vector<Account> accounts;  // of each part
};

// The window goes from the end of the first `n_before` commands (0: from the start) to that of the
// first `n_until`, and there the walk stops. `interrupted` is asked every now and then.
//
// Throws io::FailureError: a part without places or with a latency or rate below 0, a route that
// names no part, a way of holding places in a circle (in which commands could wait for one another
// forever), a command without a route or that waits for a later one, a
// window that is none.
Outcome walk(const std::vector<Part>& parts, const std::vector<Route>& routes,
             const Commands& commands, int64_t n_before, int64_t n_until,
             const std::function<bool()>& interrupted);

}  // namespace espnx::simulate
