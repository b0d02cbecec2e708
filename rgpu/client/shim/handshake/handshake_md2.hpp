// MD2, HMAC-MD2 and the answer to the CUDA runtime's self-test.
//
// Provenance: MD2 as in RFC 1319, HMAC as in RFC 2104; the message and the key were published by ZLUDA's dark-API notes
// (MIT/Apache-2.0) and checked against stock libcudart 12.4 to 13.0. It is an interoperability answer: the runtime
// refuses (error 103) a driver library that does not give it, and computes the expected value from the answers that
// this library gave before.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace rgpu::handshake {

using Digest = std::array<std::uint8_t, 16>;

// MD2 of `size` bytes (RFC 1319).
Digest md2(const std::uint8_t* data, std::size_t size);

// HMAC (RFC 2104) over MD2 with its block of 16 bytes.
Digest hmac_md2(const std::uint8_t* key, std::size_t key_size, const std::uint8_t* data, std::size_t size);

// The properties of one device that the runtime read through public calls.
struct TestedDevice {
    std::array<std::uint8_t, 16> uuid;
    std::int32_t pci_domain, pci_bus, pci_device;
};

struct SelfTest {
    std::uint32_t driver_version;   // as cuDriverGetVersion answers
    std::uint32_t version;          // the function's first argument
    std::uint32_t pid;
    std::uint32_t thread;           // low half of pthread_self()
    std::uint64_t cudart_table;     // CUDART_INTERFACE as returned
    std::uint64_t self_test_table;  // SELF_TEST as returned
    std::uint64_t function;         // the self-test function, slot 1 of that table
    std::uint64_t unix_seconds;     // the function's second argument
    std::vector<TestedDevice> devices;
};

// The 48 + 28 * devices bytes that the runtime signs as well, little-endian and packed.
std::vector<std::uint8_t> self_test_message(const SelfTest& test);

// The two words which the self-test function writes.
std::array<std::uint64_t, 2> self_test_answer(const SelfTest& test);

}  // namespace rgpu::handshake
