"""The commands of `kvmesh profile`: settings in, files and a table out. One module for each command."""
