#pragma once
#include <nanobind/nanobind.h>

namespace paceline {

void register_private_view(nanobind::module_& m);

}  // namespace paceline
