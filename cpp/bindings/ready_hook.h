#pragma once
#include <nanobind/nanobind.h>

namespace paceline {

void register_ready_hook(nanobind::module_& m);

}  // namespace paceline
