// A copy-on-write view of engine memory: edits stay private to the process.
#include "private_view.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>

#include "paceline/transport/private_view.h"

namespace nb = nanobind;

namespace paceline {

void register_private_view(nb::module_& m) {
  using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;
  nb::class_<PrivateView>(m, "PrivateView")
      .def("memory",
           [](std::shared_ptr<PrivateView> view) {
             auto held = new std::shared_ptr<PrivateView>(view);
             nb::capsule owner(held, [](void* o) noexcept { delete static_cast<std::shared_ptr<PrivateView>*>(o); });
             return Bytes(view->data(), {view->bytes()}, owner);
           })
      .def("changed", &PrivateView::changed, nb::call_guard<nb::gil_scoped_release>())
      .def("discard", &PrivateView::discard);
}

}  // namespace paceline
