// The walk of csrc/simulate as one would write it first: all events in one binary heap of the
// standard library, a queue for each part, and the same account of each. It checks nothing. Reads
// what benchmarks/simulate/heap.py writes, writes when each command has ended, prints the seconds
// of a processor that the walk took.
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <deque>
#include <fstream>
#include <iostream>
#include <queue>
#include <vector>

namespace {

struct Step {
  int64_t part, until;
  double bytes;
};

struct Event {
  double at_s;
  int64_t number, command;
  bool operator>(const Event& other) const {
    return at_s != other.at_s ? at_s > other.at_s : number > other.number;
  }
};

struct Part {
  int64_t places, free, serving = 0;
  double latency_s, per_s, last_s = 0;
  double served_s = 0, held_s = 0, waited_s = 0, idle_s = 0;
  std::deque<int64_t> waiting;

  void account(double now_s) {
    const double passed_s = now_s - last_s;
    served_s += passed_s * serving;
    held_s += passed_s * (places - free);
    waited_s += passed_s * waiting.size();
    if (free == places) idle_s += passed_s;
    last_s = now_s;
  }
};

template <class T>
T read(std::istream& in) {
  T value;
  in.read(reinterpret_cast<char*>(&value), sizeof value);
  return value;
}

double cpu_s() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

}  // namespace

int main(int, char** argv) {
  std::ifstream in(argv[1], std::ios::binary);
  std::vector<Part> parts(read<int64_t>(in));
  for (Part& part : parts) {
    part.free = part.places = read<int64_t>(in);
    part.latency_s = read<double>(in);
    part.per_s = read<double>(in);
  }
  std::vector<std::vector<Step>> routes(read<int64_t>(in));
  for (auto& route : routes) {
    route.resize(read<int64_t>(in));
    for (Step& step : route) {
      step.part = read<int64_t>(in);
      step.until = read<int64_t>(in);
      step.bytes = read<double>(in);
    }
  }
  const auto n = read<int64_t>(in);
  std::vector<int64_t> route_of(n), client(n);
  for (auto& each : route_of) each = read<int64_t>(in);
  for (auto& each : client) each = read<int64_t>(in);

  const double began_s = cpu_s();
  std::vector<int64_t> next(n, -1), at_step(n, -1), last_of;
  std::vector<bool> is_first(n, true);
  for (int64_t i = 0; i < n; ++i) {
    if (client[i] >= static_cast<int64_t>(last_of.size())) last_of.resize(client[i] + 1, -1);
    if (int64_t& last = last_of[client[i]]; last >= 0) {
      next[last] = i;
      is_first[i] = false;
    }
    last_of[client[i]] = i;
  }
  std::vector<double> ended_s(n, -1);
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
  int64_t number = 0;
  const auto serve = [&](int64_t command, double now_s) {
    const Step& step = routes[route_of[command]][at_step[command]];
    Part& part = parts[step.part];
    ++part.serving;
    const double took_s = part.latency_s + (part.per_s > 0 ? step.bytes / part.per_s : 0.0);
    events.push({now_s + took_s, number++, command});
  };
  for (int64_t i = 0; i < n; ++i)
    if (is_first[i]) events.push({0.0, number++, i});
  while (!events.empty()) {
    const auto [now_s, _, command] = events.top();
    events.pop();
    const auto& steps = routes[route_of[command]];
    const int64_t at = at_step[command];
    if (at >= 0) {
      Part& done = parts[steps[at].part];
      done.account(now_s);
      --done.serving;
      for (int64_t i = 0; i <= at; ++i) {
        if (steps[i].until != at) continue;
        Part& part = parts[steps[i].part];
        part.account(now_s);
        if (part.waiting.empty()) {
          ++part.free;
        } else {
          const int64_t other = part.waiting.front();
          part.waiting.pop_front();
          serve(other, now_s);
        }
      }
    }
    if (at + 1 == static_cast<int64_t>(steps.size())) {
      ended_s[command] = now_s;
      if (next[command] >= 0) events.push({now_s, number++, next[command]});
      continue;
    }
    at_step[command] = at + 1;
    Part& part = parts[steps[at + 1].part];
    part.account(now_s);
    if (part.free) {
      --part.free;
      serve(command, now_s);
    } else {
      part.waiting.push_back(command);
    }
  }
  const double took_s = cpu_s() - began_s;
  std::ofstream(argv[2], std::ios::binary)
      .write(reinterpret_cast<const char*>(ended_s.data()), n * sizeof(double));
  std::printf("%.9f\n", took_s);
}
