// Compiles nanobind into kvmesh.router._native. The build finds the included file in the nanobind package.
#pragma GCC optimize("no-strict-aliasing")  // nanobind asks for it; our own code does not need it
#include <nb_combined.cpp>
