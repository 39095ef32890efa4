// Queues without a wall clock in Python.
#include <tuple>

#include "bindings.hpp"
#include "simulate/queues.hpp"

namespace espnx::python {
namespace {

using simulate::Account;
using simulate::Commands;
using simulate::Outcome;
using simulate::Part;
using simulate::Route;

py::dict to_dict(const Account& account) {
  py::dict found;
  found["served_s"] = account.served_s;
  found["held_s"] = account.held_s;
  found["idle_s"] = account.idle_s;
  found["waited_s"] = account.waited_s;
  found["n_served"] = account.n_served;
  return found;
}

py::dict walk_queues(const std::vector<std::tuple<int64_t, double, double>>& parts,
                     const std::vector<std::vector<std::tuple<int64_t, double, int64_t>>>& routes,
                     const Tensor& route, const Tensor& client, std::vector<double> at_s,
                     std::vector<int64_t> after_first, std::vector<int64_t> after, int64_t n_before,
                     int64_t n_until) {
  std::vector<Part> all;
  for (const auto& [places, latency_s, per_s] : parts) all.push_back({places, latency_s, per_s});
  std::vector<Route> ways;
  for (const auto& steps : routes) {
    ways.emplace_back();
    for (const auto& [part, amount, until] : steps) ways.back().push_back({part, amount, until});
  }
  const Commands commands{to_vector(route, "route", -1), to_vector(client, "client", -1),
                          std::move(at_s), std::move(after_first), std::move(after)};
  const Outcome outcome = run_interruptibly([&](const std::function<bool()>& interrupted) {
    return simulate::walk(all, ways, commands, n_before, n_until, interrupted);
  });
  py::list accounts;
  for (const Account& account : outcome.accounts) accounts.append(to_dict(account));
  py::dict found;
  found["begun_s"] = outcome.begun_s;
  found["ended_s"] = outcome.ended_s;
  found["begin_s"] = outcome.begin_s;
  found["end_s"] = outcome.end_s;
  found["n_events"] = outcome.n_events;
  found["accounts"] = accounts;
  return found;
}

}  // namespace

void bind_simulate(py::module_& m) {
  m.def("walk_queues", &walk_queues, py::arg("parts"), py::arg("routes"), py::arg("route"),
        py::arg("client"), py::arg("at_s"), py::arg("after_first"), py::arg("after"),
        py::arg("n_before"), py::arg("n_until"));
}

}  // namespace espnx::python
