#include "simulate/queues.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "io/failure.hpp"

namespace espnx::simulate {
namespace {

constexpr int64_t kNobody = -1;
constexpr int64_t kEventsBetweenLooks = 1 << 16;  // for Ctrl-C

[[noreturn]] void fail(io::Kind kind, std::string what, std::string got, std::string expected) {
  io::Failure failure;
  failure.kind = kind;
  failure.what = std::move(what);
  failure.got = std::move(got);
  failure.expected = std::move(expected);
  throw io::FailureError(failure);
}

[[noreturn]] void refuse(std::string what, std::string got, std::string expected) {
  fail(io::Kind::invalid, std::move(what), std::move(got), std::move(expected));
}

std::string name_of(const char* kind, size_t number) {
  return std::string(kind) + " " + std::to_string(number);
}

void check_parts(const std::vector<Part>& parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    if (part.places < 1)
      refuse("places of " + name_of("part", i), std::to_string(part.places), "1 or more");
    if (!(part.latency_s >= 0) || !std::isfinite(part.latency_s))
      refuse("latency of " + name_of("part", i), std::to_string(part.latency_s),
             "0 seconds or more");
    if (!(part.per_s >= 0) || !std::isfinite(part.per_s))
      refuse("rate of " + name_of("part", i), std::to_string(part.per_s),
             "above 0, or 0 where bytes take no time");
  }
}

// Whether places are taken while others are held in one order: a part that is held while another is
// waited for never waits, over any number of steps, for itself.
void check_circle(const std::vector<std::vector<int64_t>>& held_for) {
  enum : uint8_t { fresh, under_way, done };
  std::vector<uint8_t> state(held_for.size(), fresh);
  std::vector<std::pair<int64_t, size_t>> stack;
  for (size_t root = 0; root < held_for.size(); ++root) {
    if (state[root] != fresh) continue;
    stack.emplace_back(root, 0);
    state[root] = under_way;
    while (!stack.empty()) {
      auto& [part, next] = stack.back();
      if (next == held_for[part].size()) {
        state[part] = done;
        stack.pop_back();
        continue;
      }
      const int64_t other = held_for[part][next++];
      if (state[other] == under_way)
        refuse("places that are held", "a circle through " + name_of("part", other),
               "parts in one order: commands would wait for one another forever");
      if (state[other] == fresh) {
        state[other] = under_way;
        stack.emplace_back(other, 0);
      }
    }
  }
}

void check_routes(const std::vector<Part>& parts, const std::vector<Route>& routes) {
  const auto n_parts = static_cast<int64_t>(parts.size());
  std::vector<std::vector<int64_t>> held_for(parts.size());
  for (size_t i = 0; i < routes.size(); ++i) {
    const Route& route = routes[i];
    const auto n_steps = static_cast<int64_t>(route.size());
    if (n_steps == 0) refuse(name_of("route", i), "no step", "1 or more");
    for (int64_t s = 0; s < n_steps; ++s) {
      const Step& step = route[s];
      const auto where = name_of("step", s) + " of " + name_of("route", i);
      if (step.part < 0 || step.part >= n_parts)
        refuse(where, name_of("part", step.part), "one of " + std::to_string(n_parts));
      if (!(step.amount >= 0) || !std::isfinite(step.amount))
        refuse("bytes of " + where, std::to_string(step.amount), "0 or more");
      if (step.until < s || step.until >= n_steps)
        refuse("until when " + where + " keeps its place", std::to_string(step.until),
               "itself or a later step");
      for (int64_t later = s + 1; later <= step.until; ++later)
        held_for[step.part].push_back(route[later].part);
    }
  }
  for (auto& others : held_for) {
    std::sort(others.begin(), others.end());
    others.erase(std::unique(others.begin(), others.end()), others.end());
  }
  check_circle(held_for);
}

struct Event {
  double at_s;
  int64_t number;  // in the order of causes
  int64_t command;
  bool operator<(const Event& other) const {
    return at_s != other.at_s ? at_s < other.at_s : number < other.number;
  }
};

// The earliest first: four children a node, so that a level more fits a line of cache.
class Agenda {
 public:
  void reserve(size_t n) { heap_.reserve(n); }
  bool empty() const { return heap_.empty(); }

  void push(const Event& event) {
    size_t at = heap_.size();
    heap_.push_back(event);
    for (; at > 0 && event < heap_[(at - 1) / 4]; at = (at - 1) / 4)
      heap_[at] = heap_[(at - 1) / 4];
    heap_[at] = event;
  }

  Event pop() {
    const Event first = heap_.front(), last = heap_.back();
    heap_.pop_back();
    const size_t n = heap_.size();
    if (n == 0) return first;
    size_t at = 0;
    for (size_t child = 1; child < n; child = 4 * at + 1) {
      size_t least = child;
      for (size_t other = child + 1; other < std::min(child + 4, n); ++other)
        if (heap_[other] < heap_[least]) least = other;
      if (!(heap_[least] < last)) break;
      heap_[at] = heap_[least];
      at = least;
    }
    heap_[at] = last;
    return first;
  }

 private:
  std::vector<Event> heap_;
};

class Walk {
 public:
  Walk(const std::vector<Part>& parts, const std::vector<Route>& routes, const Commands& commands)
      : parts_(parts), commands_(commands), state_(parts.size()) {
    for (const Route& route : routes) {
      first_.push_back(steps_.size());
      for (size_t s = 0; s < route.size(); ++s) {
        Planned step{route[s].part, 0, false, static_cast<int32_t>(route[s].until)};
        const Part& part = parts[step.part];
        step.takes_s = part.latency_s + (part.per_s > 0 ? route[s].amount / part.per_s : 0.0);
        for (size_t before = 0; before < s; ++before)
          step.ends_others |= route[before].until == static_cast<int64_t>(s);
        steps_.push_back(step);
      }
    }
    first_.push_back(steps_.size());
    for (size_t i = 0; i < parts.size(); ++i) state_[i].free = parts[i].places;
    const size_t n = commands.route.size();
    at_step_.assign(n, 0);
    next_.assign(n, kNobody);
    outcome_.begun_s.assign(n, -1.0);
    outcome_.ended_s.assign(n, -1.0);
    successor_.assign(n, kNobody);
  }

  Outcome run(int64_t n_before, int64_t n_until, const std::function<bool()>& interrupted) {
    arrive();
    if (n_before == 0) open_window(0.0);
    int64_t n_ended = 0;
    while (!agenda_.empty()) {
      const Event event = agenda_.pop();
      if (++outcome_.n_events % kEventsBetweenLooks == 0 && interrupted())
        fail(io::Kind::cancelled, "the simulation was interrupted", "", "");
      if (!step_ended(event.command, event.at_s)) continue;
      if (++n_ended == n_before) open_window(event.at_s);
      if (n_ended == n_until) return close_window(event.at_s);
    }
    refuse("a simulation", std::to_string(n_ended) + " commands that end", std::to_string(n_until));
  }

 private:
  struct Planned {
    int64_t part;
    double takes_s;
    bool ends_others;  // places that earlier steps keep are free when it has ended
    int32_t until;
  };

  struct PartState {
    int64_t free = 0, serving = 0, waiting = 0;
    int64_t head = kNobody, tail = kNobody;  // who waits
    double last_s = 0;
    Account account;
  };

  // Who waits for nobody is due at its arrival.
  void arrive() {
    const size_t n = commands_.client.size();
    std::vector<int64_t> newest;
    pending_.assign(n, 0);
    count_followers();
    for (size_t i = 0; i < n; ++i) {
      const auto client = static_cast<size_t>(commands_.client[i]);
      if (client >= newest.size()) newest.resize(client + 1, kNobody);
      if (newest[client] != kNobody) {
        successor_[newest[client]] = static_cast<int64_t>(i);
        ++pending_[i];
      }
      newest[client] = static_cast<int64_t>(i);
      if (!follower_first_.empty())
        pending_[i] +=
            static_cast<int32_t>(commands_.after_first[i + 1] - commands_.after_first[i]);
      if (pending_[i] == 0) agenda_.push({arrival_s(i), next_number_++, static_cast<int64_t>(i)});
    }
  }

  // Turns `after` around: who waits for each, in their order.
  void count_followers() {
    if (commands_.after_first.empty()) return;
    const size_t n = commands_.client.size();
    follower_first_.assign(n + 1, 0);
    for (const int64_t other : commands_.after) ++follower_first_[other + 1];
    for (size_t i = 0; i < n; ++i) follower_first_[i + 1] += follower_first_[i];
    followers_.resize(commands_.after.size());
    std::vector<int64_t> filled(follower_first_.begin(), follower_first_.end() - 1);
    for (size_t i = 0; i < n; ++i)
      for (int64_t at = commands_.after_first[i]; at < commands_.after_first[i + 1]; ++at)
        followers_[filled[commands_.after[at]]++] = static_cast<int64_t>(i);
  }

  double arrival_s(size_t command) const {
    return commands_.at_s.empty() ? 0.0 : commands_.at_s[command];
  }

  // An event of a command: its arrival, or the end of the step that it is in. True: the command has
  // ended.
  bool step_ended(int64_t command, double now_s) {
    const size_t first = first_[commands_.route[command]];
    int32_t& at = at_step_[command];
    if (at == 0) {
      outcome_.begun_s[command] = now_s;
    } else {
      const size_t done = first + at - 1;
      PartState& part = state_[steps_[done].part];
      touch(steps_[done].part, now_s);
      --part.serving;
      if (steps_[done].ends_others) {
        for (size_t before = first; before < done; ++before)
          if (steps_[before].until == at - 1) leave(steps_[before].part, now_s);
      }
      if (steps_[done].until == at - 1) leave(steps_[done].part, now_s);
      if (done + 1 == first_[commands_.route[command] + 1]) {
        end(command, now_s);
        return true;
      }
    }
    ++at;
    ask(command, now_s);
    return false;
  }

  const Planned& step_of(int64_t command) const {
    return steps_[first_[commands_.route[command]] + at_step_[command] - 1];
  }

  void ask(int64_t command, double now_s) {
    const Planned& step = step_of(command);
    PartState& part = state_[step.part];
    touch(step.part, now_s);
    if (part.free > 0) {
      --part.free;
      serve(command, step, now_s);
      return;
    }
    ++part.waiting;
    next_[command] = kNobody;
    (part.tail == kNobody ? part.head : next_[part.tail]) = command;
    part.tail = command;
  }

  void leave(int64_t number, double now_s) {
    PartState& part = state_[number];
    touch(number, now_s);
    if (part.head == kNobody) {
      ++part.free;
      return;
    }
    const int64_t command = part.head;
    part.head = next_[command];
    if (part.head == kNobody) part.tail = kNobody;
    --part.waiting;
    serve(command, step_of(command), now_s);
  }

  void serve(int64_t command, const Planned& step, double now_s) {
    PartState& part = state_[step.part];
    ++part.serving;
    ++part.account.n_served;
    agenda_.push({now_s + step.takes_s, next_number_++, command});
  }

  // Who waited for it, in the order of commands.
  void end(int64_t command, double now_s) {
    outcome_.ended_s[command] = now_s;
    int64_t successor = successor_[command];
    if (follower_first_.empty()) {  // who waits for one alone is due
      if (successor != kNobody) due(successor, now_s);
      return;
    }
    for (int64_t at = follower_first_[command]; at < follower_first_[command + 1]; ++at) {
      if (successor != kNobody && successor <= followers_[at])
        release(std::exchange(successor, kNobody), now_s);
      release(followers_[at], now_s);
    }
    if (successor != kNobody) release(successor, now_s);
  }

  void due(int64_t command, double now_s) {
    agenda_.push({std::max(now_s, arrival_s(command)), next_number_++, command});
  }

  // One less that it waits for.
  void release(int64_t command, double now_s) {
    if (--pending_[command] == 0) due(command, now_s);
  }

  // Adds what the part has done since it was looked at last.
  void touch(int64_t number, double now_s) {
    PartState& part = state_[number];
    const double passed_s = now_s - part.last_s;
    if (passed_s == 0) return;
    const int64_t taken = parts_[number].places - part.free;
    part.account.served_s += passed_s * static_cast<double>(part.serving);
    part.account.held_s += passed_s * static_cast<double>(taken);
    part.account.waited_s += passed_s * static_cast<double>(part.waiting);
    if (taken == 0) part.account.idle_s += passed_s;
    part.last_s = now_s;
  }

  void open_window(double now_s) {
    outcome_.begin_s = now_s;
    for (PartState& part : state_) {
      part.account = {};
      part.last_s = now_s;
    }
  }

  Outcome close_window(double now_s) {
    outcome_.end_s = now_s;
    for (size_t i = 0; i < state_.size(); ++i) {
      touch(static_cast<int64_t>(i), now_s);
      outcome_.accounts.push_back(state_[i].account);
    }
    return std::move(outcome_);
  }

  const std::vector<Part>& parts_;
  const Commands& commands_;
  std::vector<Planned> steps_;  // of all routes, one behind another
  std::vector<size_t> first_;   // step of each route
  std::vector<PartState> state_;
  std::vector<int32_t> at_step_;                     // of each command: steps that it has asked for
  std::vector<int64_t> next_;                        // who waits behind it
  std::vector<int64_t> successor_;                   // of its client
  std::vector<int64_t> follower_first_, followers_;  // who waits for it beside that
  std::vector<int32_t> pending_;                     // how many it still waits for
  Agenda agenda_;
  int64_t next_number_ = 0;
  Outcome outcome_;
};

void check_after(const Commands& commands) {
  const auto& first = commands.after_first;
  const size_t n = commands.route.size();
  if (first.empty() && commands.after.empty()) return;
  if (first.size() != n + 1 || first.front() != 0 ||
      first.back() != static_cast<int64_t>(commands.after.size()))
    refuse("where commands begin in those that are waited for", std::to_string(first.size()),
           std::to_string(n + 1) + " places, from 0 to " + std::to_string(commands.after.size()));
  for (size_t i = 0; i < n; ++i) {
    if (first[i + 1] < first[i])
      refuse("where commands begin in those that are waited for", std::to_string(first[i + 1]),
             "places in order");
    for (int64_t at = first[i]; at < first[i + 1]; ++at)
      if (commands.after[at] < 0 || commands.after[at] >= static_cast<int64_t>(i))
        refuse("what " + name_of("command", i) + " waits for",
               name_of("command", commands.after[at]), "one before it");
  }
}

void check_commands(const Commands& commands, int64_t n_routes, int64_t n_before, int64_t n_until) {
  const auto n = static_cast<int64_t>(commands.route.size());
  const auto check = [](bool is_right, const char* what, int64_t got, const std::string& expected) {
    if (!is_right) refuse(what, std::to_string(got), expected);
  };
  check(static_cast<int64_t>(commands.client.size()) == n, "clients of commands",
        static_cast<int64_t>(commands.client.size()), std::to_string(n));
  check(commands.at_s.empty() || static_cast<int64_t>(commands.at_s.size()) == n,
        "arrivals of commands", static_cast<int64_t>(commands.at_s.size()), std::to_string(n));
  for (const int64_t route : commands.route)
    check(route >= 0 && route < n_routes, "a command's route", route,
          "one of " + std::to_string(n_routes));
  for (const int64_t client : commands.client)
    check(client >= 0 && client < n, "a command's client", client, "0 to " + std::to_string(n - 1));
  for (const double at_s : commands.at_s)
    if (!(at_s >= 0) || !std::isfinite(at_s))
      refuse("a command's arrival", std::to_string(at_s), "0 seconds or more");
  check_after(commands);
  check(n_before >= 0 && n_before < n_until, "commands before the window", n_before,
        "0 or more, and less than those until its end");
  check(n_until <= n, "commands until the window's end", n_until, "at most " + std::to_string(n));
}

}  // namespace

Outcome walk(const std::vector<Part>& parts, const std::vector<Route>& routes,
             const Commands& commands, int64_t n_before, int64_t n_until,
             const std::function<bool()>& interrupted) {
  check_parts(parts);
  check_routes(parts, routes);
  check_commands(commands, static_cast<int64_t>(routes.size()), n_before, n_until);
  return Walk(parts, routes, commands).run(n_before, n_until, interrupted);
}

}  // namespace espnx::simulate
