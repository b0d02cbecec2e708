// The loop; see fuzzing.hpp. Compiled without coverage.
#include "fuzzing.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>

extern "C" void __sanitizer_set_death_callback(void (*)());

namespace fuzzing {
std::array<uint8_t, kPlaces> hit;

namespace {
constexpr size_t kLongest = 4096, kCorpus = 4000;
const char *finding = nullptr;
Bytes current;

void save() {
    const int file = finding ? ::open(finding, O_WRONLY | O_CREAT | O_TRUNC, 0644) : -1;
    if (file >= 0 && ::write(file, current.data(), current.size()) >= 0) ::close(file);
}

void run(const Bytes &bytes) {
    current = bytes;
    hit.fill(0);
    Input input(current.data(), current.size());
    one(input);
}

Bytes changed(const std::vector<Bytes> &corpus, std::mt19937_64 &random) {
    Bytes made = corpus.empty() ? Bytes{} : corpus[random() % corpus.size()];
    for (auto edits = 1 + random() % 4; edits--;) {
        const size_t at = made.empty() ? 0 : random() % made.size();
        const auto place = made.begin() + static_cast<ptrdiff_t>(at);
        switch (random() % 6) {
            case 0:
                if (!made.empty()) made[at] = static_cast<uint8_t>(random());
                break;
            case 1:
                if (!made.empty()) made[at] ^= static_cast<uint8_t>(1 << random() % 8);
                break;
            case 2: made.insert(place, 1 + random() % 8, static_cast<uint8_t>(random() % 3 ? 0 : random())); break;
            case 3: made.erase(place, place + static_cast<ptrdiff_t>(std::min<size_t>(made.size() - at, random() % 9))); break;
            case 4:
                for (auto count = 1 + random() % 64; count--;) made.push_back(static_cast<uint8_t>(random()));
                break;
            default:
                if (!corpus.empty()) {
                    const Bytes &other = corpus[random() % corpus.size()];
                    made.resize(at);
                    const size_t from = other.empty() ? 0 : random() % other.size();
                    made.insert(made.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
                }
        }
    }
    if (made.size() > kLongest) made.resize(kLongest);
    return made;
}
}  // namespace
}  // namespace fuzzing

// usage: FUZZER --seconds N --seed N [--finding FILE] [INPUT …]; with inputs only these are run
int main(int count, char **words) {
    using namespace fuzzing;
    double seconds = 1;
    uint64_t seed = 1;
    std::vector<std::string> inputs;
    for (int i = 1; i < count; ++i) {
        const std::string_view word = words[i];
        if (word == "--seconds" && i + 1 < count) seconds = std::atof(words[++i]);
        else if (word == "--seed" && i + 1 < count) seed = std::strtoull(words[++i], nullptr, 10);
        else if (word == "--finding" && i + 1 < count) finding = words[++i];
        else inputs.emplace_back(word);
    }
    __sanitizer_set_death_callback(save);
    for (const std::string &name : inputs) {
        std::ifstream file(name, std::ios::binary);
        run(Bytes(std::istreambuf_iterator<char>(file), {}));
    }
    if (!inputs.empty()) return 0;
    std::mt19937_64 random(seed);
    std::vector<Bytes> corpus;
    std::array<uint8_t, kPlaces> known{};
    size_t runs = 0, covered = 0;
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (std::chrono::steady_clock::now() < end) {
        run(changed(corpus, random));
        ++runs;
        bool news = false;
        for (size_t i = 0; i < kPlaces; ++i) {
            if (hit[i] <= known[i]) continue;
            covered += !known[i];
            known[i] = hit[i];
            news = true;
        }
        if (news && corpus.size() < kCorpus) corpus.push_back(current);
    }
    std::printf("#%zu DONE cov: %zu ft: %zu corp: %zu\n", runs, covered, covered, corpus.size());
    return 0;
}
