// AMX: tiles of 16 rows x 64 bytes, and how many of them products take together.
#pragma once

namespace {

constexpr int TILE_BYTES = 1024;
constexpr int BLOCKS = 16;  // of 32 rows, which are multiplied together

}  // namespace
