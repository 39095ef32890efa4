// What streams of a device have in common in Python: they belong to one process, and whoever waits
// looks for Ctrl-C.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "io/engine.hpp"

namespace espnx::python {

// A stream that reads by an engine and has threads of its own.
template <typename Stream>
struct PyStream {
  PyStream(const std::shared_ptr<io::Engine>& engine, int64_t window_bytes, int max_workers)
      : stream(std::make_shared<Stream>(engine, window_bytes, max_workers)) {}
  ~PyStream() {
    if (!stream->in_own_process()) {  // its threads sleep in the parent: see Engine::forget
      [[maybe_unused]] auto* left = new std::shared_ptr<Stream>(std::move(stream));
      return;
    }
    py::gil_scoped_release unlocked;  // it waits for its threads
    stream.reset();
  }

  std::shared_ptr<Stream> stream;
};

// `what`: the stream is of, for the message.
template <typename Stream>
void check_process(const Stream& stream, const char* what) {
  if (!stream.in_own_process()) {
    invalid(std::string("the ") + what + " belong to the parent process; open them after fork()");
  }
}

// Places among what a ticket asks for, as they come: at least so many, unless the time is up; and
// whether these were the last.
template <typename Stream, typename Ticket>
std::pair<NewTensor, bool> next_items(Stream& stream, Ticket& ticket, int64_t at_least,
                                      double timeout_s) {
  const auto until =
      io::Clock::now() +
      std::chrono::nanoseconds(static_cast<int64_t>(std::clamp(timeout_s, 0.0, 1e9) * 1e9));
  std::vector<int64_t> items;
  for (;;) {
    bool finished = false;
    int64_t left_ns = 0;
    {
      py::gil_scoped_release unlocked;
      const auto wanted = std::max<int64_t>(1, at_least - static_cast<int64_t>(items.size()));
      left_ns = std::chrono::nanoseconds(until - io::Clock::now()).count();
      finished =
          stream.next(ticket, wanted, std::clamp<int64_t>(left_ns, 0, kSignalCheckNs), items);
    }
    if (finished || static_cast<int64_t>(items.size()) >= at_least || left_ns <= 0) {
      return {to_tensor(std::move(items)), finished};
    }
    if (PyErr_CheckSignals() != 0) {
      {
        py::gil_scoped_release unlocked;
        stream.forget(ticket);
      }
      throw py::error_already_set();
    }
  }
}

// The counters of a stream or a ticket, in the words of `DeviceStats`.
template <typename Costs>
py::dict to_dict(const Costs& costs) {
  py::dict result;
  result["bytes_asked"] = costs.bytes_asked;
  result["bytes_moved"] = costs.bytes_moved;
  result["read_requests"] = costs.requests;
  result["waiting_s"] = costs.waiting_s;
  result["computing_s"] = costs.computing_s;
  return result;
}

}  // namespace espnx::python
