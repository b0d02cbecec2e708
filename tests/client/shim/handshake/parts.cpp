// Runs the shim's pure parts from the command line: one request a line on
// standard input, one answer a line on standard output (see test_parts.py).
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#include "fatbin.hpp"
#include "handshake_md2.hpp"
#include "occupancy_model.hpp"
#include "visible_devices.hpp"

namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes from_hex(const std::string& text) {
    Bytes out;
    if (text == "-") return out;
    for (std::size_t i = 0; i + 1 < text.size(); i += 2) out.push_back(std::stoi(text.substr(i, 2), nullptr, 16));
    return out;
}

template <typename Range>
std::string hex(const Range& bytes) {
    std::string out;
    char pair[3];
    for (const unsigned byte : bytes) {
        std::snprintf(pair, sizeof pair, "%02x", byte & 255);
        out += pair;
    }
    return out;
}

// The bytes, directly in front of an unreadable page: one byte read too many kills the process.
std::string image(const Bytes& bytes) {
    const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::size_t room = (bytes.size() + page - 1) / page * page + page;
    auto* base = static_cast<std::uint8_t*>(
        ::mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ::mprotect(base + room, page, PROT_NONE);
    std::uint8_t* start = base + room - bytes.size();
    std::copy(bytes.begin(), bytes.end(), start);
    rgpu::module_binary::Binary found;
    const auto verdict = rgpu::module_binary::find(start, &found);
    std::ostringstream out;
    out << static_cast<int>(verdict);
    if (verdict == rgpu::module_binary::Verdict::ok) {
        out << ' ' << static_cast<int>(found.kind) << ' ' << found.size;
        if (found.size <= bytes.size()) {
            for (const auto& entry : rgpu::module_binary::entries(found)) {
                out << ' ' << entry.kind << ':' << entry.architecture << ':' << entry.size;
            }
            out << " | " << rgpu::module_binary::may_run_on(found, 7, 5) << rgpu::module_binary::may_run_on(found, 9, 0);
        }
    }
    ::munmap(base, room + page);
    return out.str();
}

std::string answer(const std::string& line) {
    std::istringstream in(line);
    std::ostringstream out;
    std::string verb, a, b;
    in >> verb;
    if (verb == "md2" && in >> a) {
        const Bytes data = from_hex(a);
        return hex(rgpu::handshake::md2(data.data(), data.size()));
    }
    if (verb == "hmac" && in >> a >> b) {
        const Bytes key = from_hex(a), data = from_hex(b);
        return hex(rgpu::handshake::hmac_md2(key.data(), key.size(), data.data(), data.size()));
    }
    if (verb == "self") {
        rgpu::handshake::SelfTest test{};
        in >> test.driver_version >> test.version >> test.pid >> test.thread >> test.cudart_table >>
            test.self_test_table >> test.function >> test.unix_seconds;
        rgpu::handshake::TestedDevice device{};
        while (in >> a >> device.pci_domain >> device.pci_bus >> device.pci_device) {
            const Bytes uuid = from_hex(a);
            std::copy(uuid.begin(), uuid.end(), device.uuid.begin());
            test.devices.push_back(device);
        }
        const auto words = rgpu::handshake::self_test_answer(test);
        out << hex(rgpu::handshake::self_test_message(test)) << ' ' << words[0] << ' ' << words[1];
        return out.str();
    }
    if (verb == "visible") {
        std::vector<rgpu::Uuid> devices;
        std::getline(in, a, ';');  // the uuids, then the value (absent: not set)
        std::istringstream uuids(a);
        while (uuids >> b) {
            const Bytes bytes = from_hex(b);
            std::copy_n(bytes.begin(), 16, devices.emplace_back().begin());
        }
        std::string value;
        const bool set = static_cast<bool>(std::getline(in, value)) || line.back() == ';';
        const auto visible = rgpu::visible_devices(set ? value.c_str() : nullptr, devices);
        out << (visible.repeated ? "repeated" : "ok");
        for (const int ordinal : visible.ordinals) out << ' ' << ordinal;
        return out.str();
    }
    if (verb == "image" && in >> a) return image(from_hex(a));
    if (verb == "occupancy") {
        rgpu::occupancy::Device d;
        rgpu::occupancy::Kernel k;
        int block = 0, limit = 0;
        std::size_t dynamic = 0;
        in >> d.threads_per_block >> d.threads_per_multiprocessor >> d.blocks_per_multiprocessor >>
            d.registers_per_multiprocessor >> d.shared_per_multiprocessor >> d.shared_reserved_per_block >>
            d.multiprocessors >> d.warp >> d.major >> k.threads_per_block >> k.shared_static >> k.shared_dynamic >>
            k.registers >> a >> block >> dynamic >> limit;
        if (a == "blocks") {
            out << rgpu::occupancy::active_blocks(d, k, block, dynamic);
        } else if (a == "potential") {
            const auto best = rgpu::occupancy::potential_block(d, k, [=](int) { return dynamic; }, limit);
            out << best.grid << ' ' << best.block;
        } else {
            out << rgpu::occupancy::available_dynamic(d, k, limit, block);
        }
        return out.str();
    }
    return "what?";
}

}  // namespace

int main() {
    std::string line;
    while (std::getline(std::cin, line)) std::cout << answer(line) << std::endl;
}
