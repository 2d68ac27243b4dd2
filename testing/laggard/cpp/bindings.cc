// The module laggard._C: what Python needs beyond what PyTorch itself asks of a device.
#include "memory/crash.h"
#include "operators/generator.h"
#include "order/launch.h"
#include "memory/pinned_memory.h"
#include "order/synchronizations.h"

namespace {

namespace py = pybind11;
using namespace laggard;
using WithoutGil = py::call_guard<py::gil_scoped_release>;

void set_race_mode_by_name(const std::string& name) {
  if (name == "off") set_race_mode(RaceMode::OFF);
  else if (name == "record") set_race_mode(RaceMode::RECORD);
  else if (name == "raise") set_race_mode(RaceMode::RAISE);
  else throw py::value_error("race mode " + name + ": expected off, record or raise");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("DEVICES") = kDevices;
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("set_device",
        [](int device) { at::detail::getPrivateUse1Hooks().setCurrentDevice(static_cast<c10::DeviceIndex>(device)); });
  m.def("is_in_bad_fork", &is_in_bad_fork);
  m.def("default_generator", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });
  m.def("synchronize", [](int device) { synchronize_device(device, "synchronize"); }, WithoutGil());

  m.def("set_delay", &set_delay, py::arg("microseconds"), py::arg("seed"));
  m.def("set_lazy", &set_lazy, WithoutGil());
  m.def("stop", &stop_schedule, WithoutGil());
  m.def("set_stacks", &set_stacks);
  m.def("explain_crashes", &explain_crashes);

  py::class_<Race>(m, "Race")
      .def_property_readonly("summary", &Race::summary)
      .def_property_readonly("report", &Race::report)
      .def_property_readonly("earlier", [](const Race& race) { return race.earlier.op; })
      .def_property_readonly("later", [](const Race& race) { return race.later.op; })
      .def("__repr__", [](const Race& race) { return "<Race: " + race.summary() + ">"; });
  m.def("set_race_mode", &set_race_mode_by_name);
  m.def("take_races", &take_races);

  py::class_<Synchronization>(m, "Synchronization")
      .def_readonly("reason", &Synchronization::reason)
      .def_readonly("thread", &Synchronization::thread)
      .def_property_readonly("stack", [](const Synchronization& sync) { return text_of(sync.stack); })
      .def("__repr__", [](const Synchronization& sync) { return "<Synchronization: " + sync.reason + ">"; });
  m.def("take_synchronizations", &take_synchronizations);
  m.def("set_counted", &set_counted);

  py::class_<TimeModel>(m, "TimeModel")
      .def(py::init<>())
      .def_readwrite("copy_gb_s", &TimeModel::copy_gb_s)
      .def_readwrite("copy_us", &TimeModel::copy_us)
      .def_readwrite("memory_gb_s", &TimeModel::memory_gb_s)
      .def_readwrite("tera_flops", &TimeModel::tera_flops)
      .def_readwrite("kernel_us", &TimeModel::kernel_us)
      .def_readwrite("launch_us", &TimeModel::launch_us)
      .def_readwrite("host_speed", &TimeModel::host_speed);
  py::class_<Span>(m, "Span")
      .def_readonly("op", &Span::op)
      .def_property_readonly("device", [](const Span& span) { return span.stream / kStreamsPerDevice; })
      .def_property_readonly("stream", [](const Span& span) { return span.stream % kStreamsPerDevice; })
      .def_readonly("begin_ms", &Span::begin_ms)
      .def_readonly("end_ms", &Span::end_ms)
      .def_readonly("bytes", &Span::bytes);
  m.def("start_simulated_time", &start_simulated_time);
  m.def("stop_simulated_time", &stop_simulated_time);
  m.def("take_timeline", &take_timeline);
  m.def("host_clock_ms", [] {
    const HostSection section;
    return clock_ms();
  });
  m.def("host_use", [](uint64_t thread) {
    const HostUse use = host_use(thread);
    return std::pair(use.inside_ms, use.launches);
  });
  m.def("spend_host_time", [](double ms) {
    const HostSection section;
    clock_ms() += ms;
  });

  m.def("register_host_memory", &register_host_memory);
  m.def("unregister_host_memory", &unregister_host_memory);
  m.def("is_closable", &is_closable);
  m.def("pinned_bytes", [] {
    const auto stats = at::getHostAllocator(at::kPrivateUse1)->get_stats();
    return std::pair(stats.allocated_bytes.current, stats.allocated_bytes.peak);
  });

  py::class_<Completion, CompletionPtr>(m, "Gate")
      .def(py::init<>())
      .def("set", &Completion::set, WithoutGil())
      .def("is_set", &Completion::is_set);
  m.def(
      "stream_wait_gate",
      [](int device, int id, const CompletionPtr& gate) { wait(device * kStreamsPerDevice + id, gate); }, WithoutGil());
  m.def("staging_memory", &staging_memory);
}
