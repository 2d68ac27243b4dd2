#pragma once
#include <nanobind/nanobind.h>

namespace paceline {

void register_kernels(nanobind::module_& m);

}  // namespace paceline
