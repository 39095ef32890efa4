// The virtual clock of emulated devices in Python.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <tuple>

#include "bindings.hpp"
#include "device/link_clock.hpp"

namespace espnx::python {
namespace {

using device::LinkClock;
using device::LinkTicket;
using device::LinkTransfer;

// A clock in the process that made it: a thread of the parent may have been inside it when a child
// was forked.
class PyLinkClock {
 public:
  PyLinkClock(const std::vector<std::pair<std::string, double>>& links, int64_t lanes,
              double stretch)
      : clock_(std::make_unique<LinkClock>(to_links(links), lanes, stretch)) {}
  ~PyLinkClock() {
    if (process_ != getpid()) (void)clock_.release();
  }

  LinkClock& get() const {
    if (process_ != getpid())
      invalid("the topology belongs to the parent process; make one after fork()");
    return *clock_;
  }

 private:
  static std::vector<device::Link> to_links(
      const std::vector<std::pair<std::string, double>>& given) {
    std::vector<device::Link> links;
    for (const auto& [name, latency_s] : given) links.push_back({name, latency_s});
    return links;
  }

  std::unique_ptr<LinkClock> clock_;
  pid_t process_ = getpid();
};

LinkTicket transfer(const PyLinkClock& self,
                    const std::vector<std::tuple<int64_t, double, double>>& path, int64_t lane,
                    int64_t size_bytes, double before_s, const std::vector<LinkTicket>& after,
                    int64_t member) {
  std::vector<device::Leg> legs;
  for (const auto& [link, amount, per_s] : path) legs.push_back({link, amount, per_s});
  LinkClock& clock = self.get();
  py::gil_scoped_release unlocked;
  return clock.transfer(std::move(legs), lane, size_bytes, before_s, after, member);
}

std::optional<double> wait(const PyLinkClock& self, const std::vector<LinkTicket>& tickets,
                           std::optional<double> asked_s, double deadline_s, int64_t member) {
  if (!(deadline_s > 0) || (asked_s && std::isnan(*asked_s)))
    invalid("deadline_s must be positive, asked_s a number");
  const auto until =
      LinkClock::Wall::now() +
      std::chrono::nanoseconds(static_cast<int64_t>(std::min(deadline_s, 1e9) * 1e9));
  LinkClock& clock = self.get();
  return run_interruptibly([&](const std::function<bool()>& interrupted) {
    return clock.wait(tickets, asked_s, until, member, interrupted);
  });
}

// A call of a clock that takes a member, or nothing, and may have to wait for the clock's mutex.
template <auto call, typename... Args>
auto unlocked(const PyLinkClock& self, Args... args) {
  LinkClock& clock = self.get();
  py::gil_scoped_release unlocked;
  return (clock.*call)(args...);
}

}  // namespace

void bind_links(py::module_& m) {
  py::class_<LinkTransfer, LinkTicket>(m, "LinkTicket");
  py::class_<PyLinkClock>(m, "LinkClock")
      .def(py::init<const std::vector<std::pair<std::string, double>>&, int64_t, double>(),
           py::arg("links"), py::arg("lanes"), py::arg("stretch"))
      .def("transfer", &transfer, py::arg("path"), py::arg("lane"), py::arg("size_bytes"),
           py::arg("before_s"), py::arg("after"), py::arg("member") = LinkClock::kNobody)
      .def("wait", &wait, py::arg("tickets"), py::arg("asked_s"), py::arg("deadline_s"),
           py::arg("member") = LinkClock::kNobody)
      .def("done",
           [](const PyLinkClock& self, const LinkTicket& ticket) {
             LinkClock& clock = self.get();
             py::gil_scoped_release unlocked;
             return clock.done(ticket);
           })
      .def("cancel",
           [](const PyLinkClock& self, const LinkTicket& ticket) {
             LinkClock& clock = self.get();
             py::gil_scoped_release unlocked;
             clock.cancel(ticket);
           })
      .def("now", &unlocked<&LinkClock::now>)
      .def("advance", &unlocked<&LinkClock::advance, double>)
      .def("join", &unlocked<&LinkClock::join>)
      .def("rest", &unlocked<&LinkClock::rest, int64_t>)
      .def("resume", &unlocked<&LinkClock::resume, int64_t>)
      .def("leave", &unlocked<&LinkClock::leave, int64_t>)
      .def("at_work", &unlocked<&LinkClock::at_work>)
      .def("times",
           [](const PyLinkClock& self) {
             LinkClock& clock = self.get();
             const device::LinkTimes times = [&] {
               py::gil_scoped_release unlocked;
               return clock.times();
             }();
             return std::make_tuple(times.now_s, times.waited_s, times.late_s);
           })
      .def("traffic",
           [](const PyLinkClock& self) {
             LinkClock& clock = self.get();
             const auto traffic = [&] {
               py::gil_scoped_release unlocked;
               return clock.traffic();
             }();
             std::vector<std::tuple<std::string, double, double, int64_t>> rows;
             for (const auto& link : traffic)
               rows.emplace_back(link.name, link.amount, link.busy_s, link.transfers);
             return rows;
           })
      .def("close", &unlocked<&LinkClock::close>);
}

}  // namespace espnx::python
