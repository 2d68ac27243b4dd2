// The Python bindings of the core: they take addresses and counts and return handles. They release the GIL to wait.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "codecs.h"
#include "errors.h"
#include "kernels.h"
#include "private_view.h"
#include "ready_hook.h"
#include "torch_tensor.h"
#include "paceline/base/clock.h"
#include "paceline/collectives/group.h"
#include "paceline/reduce/kernels.h"
#include "paceline/transport/private_view.h"
#include "paceline/wire/record.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

using Parts = std::vector<std::pair<uintptr_t, uint64_t>>;
constexpr double kForever = 1e9;
constexpr double kSignalCheck_s = 0.1;  // how long a wait may delay Ctrl-C

std::vector<Part> to_parts(const Parts& parts) {
  std::vector<Part> out;
  out.reserve(parts.size());
  for (auto& [address, count] : parts) out.push_back({reinterpret_cast<void*>(address), count});
  return out;
}

// Waits in slices, so that signals are handled. An interrupted operation fails its group, because its memory may be
// freed while peers still use it.
void wait_for(Group& group, Operation& operation, double timeout_s) {
  double deadline = now_s() + timeout_s;
  while (!operation.finished()) {
    bool finished;
    {
      nb::gil_scoped_release release;
      finished = group.engine().wait(operation, std::min(kSignalCheck_s, std::max(0.0, deadline - now_s())));
    }
    if (finished) break;
    if (PyErr_CheckSignals() != 0) {
      nb::python_error raised;
      {
        nb::gil_scoped_release release;
        group.fail(
            ErrorKind::generation_changed,
            "rank " + std::to_string(group.engine().config().rank) + " was interrupted during " + operation.describe(),
            -1);
      }
      throw raised;
    }
    if (now_s() >= deadline)
      throw Error(ErrorKind::peer_timeout, operation.describe() + " has not finished after " +
                                               std::to_string(timeout_s) + " s; it continues in the background.");
  }
  operation.rethrow();
}

struct PyWork {
  std::shared_ptr<Group> group;
  OperationPtr operation;
  std::shared_ptr<int> source;
  std::shared_ptr<NamedCall> call;  // of a named operation

  // The memory that a named operation with results of any size has allocated.
  nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> output() const {
    if (!done() || !call || !call->output) throw Error(ErrorKind::usage, "this operation has no output of its own");
    uint64_t count = 0;
    for (uint64_t one : call->counts) count += one;
    nb::capsule owner(new std::shared_ptr<NamedCall>(call),
                      [](void* held) noexcept { delete static_cast<std::shared_ptr<NamedCall>*>(held); });
    return {call->output.get(), {size_t(count * call->request.element_bytes())}, owner};
  }

  bool done() const { return operation->finished(); }
  void wait(std::optional<double> timeout_s) { wait_for(*group, *operation, timeout_s.value_or(kForever)); }
  nb::object error() const {
    if (!operation->finished() || !operation->error()) return nb::none();
    try {
      operation->rethrow();
    } catch (const Error& e) {
      return to_python(e);
    } catch (const std::exception& e) {
      return nb::module_::import_("paceline.errors").attr("PacelineError")(text_of(e));
    }
    return nb::none();
  }
};

// Adds the operations of these works, and returns their engine; null without works. They belong to one engine.
Engine* collect(const nb::tuple& works, std::vector<Operation*>& operations) {
  auto* type = reinterpret_cast<PyTypeObject*>(nb::type<PyWork>().ptr());
  operations.reserve(works.size());
  Engine* engine = nullptr;
  for (nb::handle h : works) {
    if (!PyObject_TypeCheck(h.ptr(), type))
      throw Error(ErrorKind::usage,
                  "wait_any: takes works of the engine, not " + std::string(nb::type_name(h.type()).c_str()));
    PyWork& work = *nb::inst_ptr<PyWork>(h);
    if (engine && engine != &work.group->engine())
      throw Error(ErrorKind::usage, "wait_any: the works belong to different engines");
    engine = &work.group->engine();
    operations.push_back(work.operation.get());
  }
  return engine;
}

// Returns the lowest index of an operation that has finished or failed; -1 after the timeout, or if there are
// completions. An interrupt only raises and fails no group.
int wait_any(Engine& engine, const std::vector<Operation*>& operations, const Completions* completions,
             std::optional<double> timeout_s) {
  double deadline = now_s() + timeout_s.value_or(kForever);
  for (;;) {
    int ready;
    {
      nb::gil_scoped_release release;
      ready = engine.wait_any(operations, completions, std::clamp(deadline - now_s(), 0.0, kSignalCheck_s));
    }
    if (ready >= 0 || (completions && completions->has_any())) return ready;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (now_s() >= deadline) return -1;
  }
}

int wait_any_work(nb::sequence works, std::optional<double> timeout_s) {
  nb::tuple held(works);  // keeps them while the GIL is released
  std::vector<Operation*> operations;
  Engine* engine = collect(held, operations);
  if (!engine) throw Error(ErrorKind::usage, "wait_any: the list of works is empty, so none can ever finish");
  return wait_any(*engine, operations, nullptr, timeout_s);
}

struct PyEngine {
  std::shared_ptr<Engine> engine;

  PyEngine(int rank, int num_local, double timeout_s, double liveness_s, double warn_s, std::string links,
           double remote_s)
      : engine(std::make_shared<Engine>(
            EngineConfig{rank, num_local, timeout_s, liveness_s, warn_s, std::move(links), remote_s})) {}

  using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

  Bytes allocate(size_t bytes, bool apart) {
    void* p;
    {
      nb::gil_scoped_release release;
      p = apart ? engine->arena().allocate_apart(bytes) : engine->arena().allocate(bytes);
    }
    struct Owner {
      std::shared_ptr<Engine> engine;
      void* p;
    };
    nb::capsule owner(new Owner{engine, p}, [](void* o) noexcept {
      auto* owner = static_cast<Owner*>(o);
      owner->engine->arena().free(owner->p);
      delete owner;
    });
    return Bytes(p, {bytes}, owner);
  }

  std::pair<uint64_t, uint64_t> locate(uintptr_t address, size_t bytes) const {
    auto where = engine->arena().locate(reinterpret_cast<void*>(address), bytes);
    if (!where) throw Error(ErrorKind::usage, "this memory is not engine memory; allocate it with pl.empty");
    return {where->segment, where->offset};
  }

  Bytes memory_of_peer(int rank, uint64_t segment, uint64_t offset, size_t bytes) {
    auto held = new std::shared_ptr<Segment>(find(rank, {segment, offset}, bytes));
    nb::capsule owner(held, [](void* o) noexcept { delete static_cast<std::shared_ptr<Segment>*>(o); });
    return Bytes((*held)->data() + offset, {bytes}, owner);
  }

  std::shared_ptr<PrivateView> private_view(int rank, uint64_t segment, uint64_t offset, size_t bytes) {
    std::shared_ptr<PrivateView> view;
    with_file(rank, segment, offset, bytes, [&](int fd) { view = std::make_shared<PrivateView>(fd, offset, bytes); });
    return view;
  }

  void show_in(PrivateView& view, size_t at, int rank, uint64_t segment, uint64_t offset, size_t bytes) {
    with_file(rank, segment, offset, bytes, [&](int fd) { view.show(at, bytes, fd, offset); });
  }

 private:
  // Calls `use` with the file of a segment of this process or a neighbour.
  template <typename Use>
  void with_file(int rank, uint64_t segment, uint64_t offset, size_t bytes, Use use) {
    if (rank != engine->config().rank) {
      auto found = find(rank, {segment, offset}, bytes);
      use(found->fd());
      return;
    }
    bool is_found = false;
    engine->arena().for_each_segment([&](uint64_t id, size_t size, int fd) {
      if (id != segment || offset > size || bytes > size - offset) return;
      is_found = true;
      use(fd);
    });
    if (!is_found) throw Error(ErrorKind::usage, "this process has no such engine memory");
  }

  std::shared_ptr<Segment> find(int rank, const Location& where, size_t bytes) {
    auto link = engine->link(rank);
    std::shared_ptr<Segment> segment;
    if (link) {
      nb::gil_scoped_release release;
      segment = link->find(where, bytes);
    }
    if (!segment)
      throw Error(ErrorKind::usage, "rank " + std::to_string(rank) + " has no such engine memory on this host", rank);
    return segment;
  }
};

// Works of which many are pending and few finish at a time: each is added once, and only the finished ones are taken.
class PyCompletions {
 public:
  explicit PyCompletions(PyEngine& engine) : engine_(engine.engine) {}

  void add(PyWork& work, int64_t number) { work.operation->report_to(completions_, number); }
  std::vector<int64_t> wait(nb::sequence works, std::optional<double> timeout_s) {
    nb::tuple held(works);
    std::vector<Operation*> operations;
    if (Engine* engine = collect(held, operations); engine && engine != engine_.get())
      throw Error(ErrorKind::usage, "Completions.wait: the works belong to another engine");
    wait_any(*engine_, operations, completions_.get(), timeout_s);
    return completions_->take();
  }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Completions> completions_ = std::make_shared<Completions>();
};

class PyGroup {
 public:
  PyGroup(PyEngine& engine, uint64_t id, uint32_t generation, std::vector<int> ranks, std::vector<int> hosts,
          double timeout_s, double forming_s, bool is_lazy) {
    nb::gil_scoped_release release;
    auto* group =
        new Group(engine.engine, {id, generation, std::move(ranks), std::move(hosts), timeout_s, forming_s, is_lazy});
    // A garbage collection may drop the last reference, and a group waits for its members when it closes.
    group_ = std::shared_ptr<Group>(group, [](Group* g) {
      std::optional<nb::gil_scoped_release> release;
      if (PyGILState_Check()) release.emplace();
      delete g;
    });
  }

  void close() {
    auto group = std::move(group_);  // under the GIL: other threads see the group or none
    if (!group) return;
    nb::gil_scoped_release release;
    group->close();
    group.reset();
  }

  // Another thread may close the group while this one waits in it.
  std::shared_ptr<Group> hold() {
    get();
    return group_;
  }

  Group& get() {
    if (!group_) throw Error(ErrorKind::usage, "this group has been closed");
    return *group_;
  }

  // A separate path without lists for the most frequent call.
  void all_reduce(uintptr_t in, uintptr_t out, uint64_t count, int dtype, int op, std::vector<int64_t> shape) {
    run_all_reduce(reduction(in, out, count, dtype, op, std::move(shape)));
  }
  // In place, of a plain torch tensor. False if it is anything else, or the reduction is not defined for its dtype:
  // then nothing has happened, and the caller takes the long way, which reports errors.
  bool all_reduce_tensor(nb::handle tensor, int op) {
    TensorMemory memory;
    if (!read_tensor(tensor.ptr(), memory) || !is_defined(ReduceOp(op), memory.dtype)) return false;
    auto data = uintptr_t(memory.data);
    run_all_reduce(
        reduction(data, data, memory.count, int(memory.dtype), op, {memory.shape, memory.shape + memory.ndim}));
    return true;
  }
  PyWork start_all_reduce(uintptr_t in, uintptr_t out, uint64_t count, int dtype, int op, std::vector<int64_t> shape) {
    return {group_, get().submit(reduction(in, out, count, dtype, op, std::move(shape)), true), nullptr, nullptr};
  }

  void run(int kind, int dtype, int op, int root, const Parts& in, const Parts& out, std::vector<int64_t> shape) {
    auto group = hold();
    auto operation = group->submit(request(kind, dtype, op, root, in, out, std::move(shape)), false);
    wait_for(*group, *operation, kForever);
  }
  PyWork start(int kind, int dtype, int op, int root, const Parts& in, const Parts& out, std::vector<int64_t> shape) {
    return {group_, get().submit(request(kind, dtype, op, root, in, out, std::move(shape)), true), nullptr, nullptr};
  }

  // Named operations (named.h). A blocking all-reduce has a path of its own, as above.
  void all_reduce_named(const std::string& name, uint32_t detail, uintptr_t in, uintptr_t out, uint64_t count,
                        int dtype, int op, std::vector<int64_t> shape) {
    auto group = hold();
    auto call = std::make_shared<NamedCall>();
    call->request = reduction(in, out, count, dtype, op, std::move(shape));
    call->label = name;
    call->detail = detail;
    auto operation = group->submit_named(std::move(call), false);
    wait_for(*group, *operation, kForever);
  }
  PyWork start_named(const std::string& name, uint32_t detail, int kind, int dtype, int op, int root, const Parts& in,
                     const Parts& out, std::vector<int64_t> shape, bool takes_any_size, bool background) {
    auto call = std::make_shared<NamedCall>();
    call->request = request(kind, dtype, op, root, in, out, std::move(shape));
    call->label = name;
    call->detail = detail;
    call->takes_any_size = takes_any_size;
    return {group_, get().submit_named(call, background), nullptr, call};
  }

  // `background` is false if the caller waits at once and drives the operation itself.
  PyWork start_send(int member, uint64_t tag, uintptr_t data, uint64_t count, int dtype, bool background) {
    Part part{reinterpret_cast<void*>(data), count};
    return {group_, get().submit_send(member, tag, part, DType(dtype), background), nullptr, nullptr};
  }
  PyWork start_receive(int member, uint64_t tag, uintptr_t data, uint64_t count, int dtype, bool background) {
    Part part{reinterpret_cast<void*>(data), count};
    auto source = std::make_shared<int>(-1);
    return {group_, get().submit_receive(member, tag, part, DType(dtype), source, background), source, nullptr};
  }

  // Takes over the descriptor. With keys (the cipher's number, to send, to receive) its bytes are encrypted.
  void add_channel(int member, int lane, int fd, std::optional<std::tuple<int, nb::bytes, nb::bytes>> keys) {
    Fd socket(fd);
    if (!keys) return get().add_channel(member, Lane(lane), std::move(socket));
    LinkKeys link_keys;
    auto& [cipher, send, receive] = *keys;
    if (cipher < 0 || cipher >= int(CipherKind::count_) || send.size() != kKeyBytes || receive.size() != kKeyBytes)
      throw Error(ErrorKind::usage, "add_channel: expected a cipher of CIPHERS and two keys of 32 bytes");
    link_keys.cipher = CipherKind(cipher);
    std::memcpy(link_keys.send.data(), send.data(), kKeyBytes);
    std::memcpy(link_keys.receive.data(), receive.data(), kKeyBytes);
    get().add_channel(member, Lane(lane), std::move(socket), &link_keys);
    explicit_bzero(&link_keys, sizeof link_keys);
  }
  // With a lost rank it fails with PeerLost, else with GenerationChanged.
  void fail(const std::string& text, std::optional<int> lost) {
    auto group = group_;
    if (!group) return;  // any thread may call this; if the group has just been closed, there is nothing to end
    nb::gil_scoped_release release;
    group->fail(lost ? ErrorKind::peer_lost : ErrorKind::generation_changed, text, lost.value_or(-1));
    group.reset();
  }

 private:
  // To release the GIL would take longer than a small one.
  void run_all_reduce(Request request) {
    auto group = hold();
    OperationPtr rest;
    if (request.inputs[0].count * request.element_bytes() > kSlotBytes) {
      nb::gil_scoped_release release;
      rest = group->all_reduce(std::move(request));
    } else {
      rest = group->all_reduce(std::move(request));
    }
    if (rest) wait_for(*group, *rest, kForever);
  }
  static Request reduction(uintptr_t in, uintptr_t out, uint64_t count, int dtype, int op, std::vector<int64_t> shape) {
    Request r;
    r.kind = Kind::all_reduce;
    r.dtype = DType(dtype);
    r.op = ReduceOp(op);
    r.inputs.push_back({reinterpret_cast<void*>(in), count});
    r.outputs.push_back({reinterpret_cast<void*>(out), count});
    r.shape = std::move(shape);
    return r;
  }
  static Request request(int kind, int dtype, int op, int root, const Parts& in, const Parts& out,
                         std::vector<int64_t> shape) {
    return {Kind(kind), DType(dtype), ReduceOp(op), root, to_parts(in), to_parts(out), std::move(shape)};
  }
  std::shared_ptr<Group> group_;
};

}  // namespace
}  // namespace paceline

NB_MODULE(_core, m) {
  using namespace paceline;
  m.doc() = "Paceline's engine: collectives over shared memory and TCP.";
  // A torch future that never ended keeps its work alive beyond the interpreter's end; do not warn the user about it.
  nb::set_leak_warnings(false);
  register_errors();
  register_kernels(m);
  register_private_view(m);
  register_ready_hook(m);
  register_codecs(m);
  register_torch_tensor(m);
  m.attr("DTYPES") = [] {
    nb::list names;
    for (int i = 0; i < int(DType::count_); ++i) names.append(name_of(DType(i)));
    return nb::tuple(names);
  }();
  m.attr("OPS") = [] {
    nb::list names;
    for (int i = 0; i < int(ReduceOp::count_); ++i) names.append(name_of(ReduceOp(i)));
    return nb::tuple(names);
  }();
  m.attr("CIPHERS") = nb::make_tuple(name_of(CipherKind::aes_256_gcm), name_of(CipherKind::chacha20_poly1305));
  m.def("preferred_cipher", [] { return name_of(preferred_cipher()); });
  m.def("cipher_library", &cipher_library);
  m.def(
      "create_emulated_links",
      [](const std::string& path, uint32_t num_hosts, double bytes_per_s, double latency_s) {
        EmulatedLinks::create(path, {num_hosts, bytes_per_s, latency_s});
      },
      "path"_a, "num_hosts"_a, "bytes_per_s"_a, "latency_s"_a);
  m.def(
      "read_emulated_links",
      [](const std::string& path) {
        LinkFacts facts = EmulatedLinks(path).facts();
        return std::tuple(facts.num_hosts, facts.bytes_per_s, facts.latency_s);
      },
      "path"_a);
  m.attr("KINDS") = [] {
    nb::list names;
    for (int i = 0; i < int(Kind::count_); ++i) names.append(name_of(Kind(i)));
    return nb::tuple(names);
  }();

  nb::class_<PyWork>(m, "Work")
      .def("done", &PyWork::done)
      .def("wait", &PyWork::wait, "timeout_s"_a = nb::none())
      .def("error", &PyWork::error)
      .def("source", [](const PyWork& w) { return w.source ? *w.source : -1; })
      .def("counts", [](const PyWork& w) { return w.call ? w.call->counts : std::vector<uint64_t>(); })
      .def("output", &PyWork::output)
      .def("last_joined", [](const PyWork& w) { return w.call ? w.call->last_joined : -1; });
  m.def("wait_any", &wait_any_work, "works"_a, "timeout_s"_a = nb::none());

  nb::class_<PyEngine>(m, "Engine")
      .def(nb::init<int, int, double, double, double, std::string, double>(), "rank"_a, "num_local"_a, "timeout_s"_a,
           "liveness_s"_a, "warn_s"_a, "links"_a = "", "remote_s"_a = 0.0)
      .def(
          "add_local_peer", [](PyEngine& e, int rank, int fd) { e.engine->add_local_peer(rank, Fd(fd)); }, "rank"_a,
          "fd"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "await_local_peers",
          [](PyEngine& e, double timeout_s, std::vector<int> ranks) {
            e.engine->await_local_peers(timeout_s, std::move(ranks));
          },
          "timeout_s"_a, "ranks"_a = std::vector<int>(), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "introduce_neighbours", [](PyEngine& e, double timeout_s) { e.engine->introduce_neighbours(timeout_s); },
          "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "await_introductions",
          [](PyEngine& e, int hub, const std::vector<int>& ranks, double timeout_s) {
            return e.engine->await_introductions(hub, ranks, timeout_s);
          },
          "hub"_a, "ranks"_a, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "set_num_local", [](PyEngine& e, int num_local) { e.engine->set_num_local(num_local); }, "num_local"_a)
      .def(
          "end_peer", [](PyEngine& e, int rank) { return e.engine->end_peer(rank); }, "rank"_a,
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "forget_peer", [](PyEngine& e, int rank) { e.engine->forget_peer(rank); }, "rank"_a,
          nb::call_guard<nb::gil_scoped_release>())
      .def("allocate", &PyEngine::allocate, "nbytes"_a, "apart"_a = false)
      .def("locate", &PyEngine::locate, "address"_a, "nbytes"_a)
      .def("private_view", &PyEngine::private_view, "rank"_a, "segment"_a, "offset"_a, "nbytes"_a)
      .def("show_in", &PyEngine::show_in, "view"_a, "at"_a, "rank"_a, "segment"_a, "offset"_a, "nbytes"_a)
      .def("memory_of_peer", &PyEngine::memory_of_peer, "rank"_a, "segment"_a, "offset"_a, "nbytes"_a)
      .def("bytes_sent",
           [](PyEngine& e) {
             Traffic& traffic = e.engine->traffic();
             return std::pair(traffic.on_host.load(), traffic.over_network.load());
           })
      .def("channel_requests_fd", [](PyEngine& e) { return e.engine->channel_requests_fd(); })
      .def("take_channel_requests",
           [](PyEngine& e) {
             nb::list requests;
             for (auto& one : e.engine->take_channel_requests())
               requests.append(nb::make_tuple(one.group, one.generation, one.rank, one.lane));
             return requests;
           })
      .def("long_waits",
           [](PyEngine& e) {
             nb::list waits;
             for (auto& wait : e.engine->long_waits())
               waits.append(nb::make_tuple(wait.operation, wait.age_s, wait.ranks));
             return waits;
           })
      .def(
          "count_sent", [](PyEngine& e, uint64_t bytes) { e.engine->traffic().on_host += bytes; }, "nbytes"_a)
      .def(
          "say_goodbye", [](PyEngine& e) { e.engine->say_goodbye(); }, nb::call_guard<nb::gil_scoped_release>())
      .def("close_after_fork", [](PyEngine& e) { e.engine->close_after_fork(); });

  nb::class_<PyCompletions>(m, "Completions")
      .def(nb::init<PyEngine&>(), "engine"_a)
      .def("add", &PyCompletions::add, "work"_a, "number"_a)
      .def("wait", &PyCompletions::wait, "works"_a = nb::make_tuple(), "timeout_s"_a = nb::none());

  nb::class_<PyGroup>(m, "Group", nb::is_weak_referenceable())
      .def(nb::init<PyEngine&, uint64_t, uint32_t, std::vector<int>, std::vector<int>, double, double, bool>(),
           "engine"_a, "id"_a, "generation"_a, "ranks"_a, "hosts"_a, "timeout_s"_a, "forming_s"_a = 0,
           "is_lazy"_a = false)
      .def("close", &PyGroup::close)
      .def("fail", &PyGroup::fail, "text"_a, "lost"_a = nb::none())
      .def("failed", [](PyGroup& g) { return g.get().failed(); })
      .def("add_channel", &PyGroup::add_channel, "member"_a, "lane"_a, "fd"_a, "keys"_a = nb::none())
      .def("all_reduce", &PyGroup::all_reduce, "input"_a, "output"_a, "count"_a, "dtype"_a, "op"_a, "shape"_a)
      .def("all_reduce_tensor", &PyGroup::all_reduce_tensor, "tensor"_a.none(), "op"_a)
      .def("start_all_reduce", &PyGroup::start_all_reduce, "input"_a, "output"_a, "count"_a, "dtype"_a, "op"_a,
           "shape"_a)
      .def("run", &PyGroup::run, "kind"_a, "dtype"_a, "op"_a, "root"_a, "inputs"_a, "outputs"_a, "shape"_a)
      .def("start", &PyGroup::start, "kind"_a, "dtype"_a, "op"_a, "root"_a, "inputs"_a, "outputs"_a, "shape"_a)
      .def("all_reduce_named", &PyGroup::all_reduce_named, "name"_a, "detail"_a, "input"_a, "output"_a, "count"_a,
           "dtype"_a, "op"_a, "shape"_a)
      .def("start_named", &PyGroup::start_named, "name"_a, "detail"_a, "kind"_a, "dtype"_a, "op"_a, "root"_a,
           "inputs"_a, "outputs"_a, "shape"_a, "takes_any_size"_a = false, "background"_a = true)
      .def("start_send", &PyGroup::start_send, "member"_a, "tag"_a, "address"_a, "count"_a, "dtype"_a,
           "background"_a = true)
      .def("start_receive", &PyGroup::start_receive, "member"_a, "tag"_a, "address"_a, "count"_a, "dtype"_a,
           "background"_a = true);
}
