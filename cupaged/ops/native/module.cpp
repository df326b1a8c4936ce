// The kernels as a Python module, in the stable ABI of Python 3.11. Arrays come through the buffer
// protocol; their sizes are checked here, their types, and that outputs overlap no inputs, are the
// caller's affair.
#include "arguments.h"

#include <atomic>
#include <cstring>

#include "kernels.h"
#include "packing.h"

namespace {

std::atomic<const Kernels*> chosen{&kernels_of_any};

constexpr std::int64_t kLargestHead = 65536;  // elements of a head
constexpr std::int64_t kMostQueries = 1024;   // of a task of attention: its tokens times query heads

const Kernels* const kAllKernels[] = {
#if HAS_AMX
    &kernels_of_amx,
#endif
#if defined(__x86_64__)
    &kernels_of_vnni,
    &kernels_of_avx512,
    &kernels_of_avx2,
#endif
    &kernels_of_any,
};

// Other threads of Python may run while the work is done.
template <class Work>
PyObject* without_lock(const Arguments& arguments, const Work& work) {
  if (!arguments.ok()) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  work();
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

const Kernels& kernels() { return *chosen.load(std::memory_order_relaxed); }

Format format_of(Arguments& arguments) {
  const std::int64_t number = arguments.integer("format", 0);
  arguments.require(number <= 3, "format is none of 0 to 3");
  return static_cast<Format>(arguments.ok() ? number : 0);
}

void require_groups(Arguments& arguments, Format format, std::int64_t in_features) {
  arguments.require(format < Format::int8 || in_features % 32 == 0,
                    "in_features of quantised weights must be a multiple of 32");
}

// The last arguments of both: packed, format, out_features, in_features
void read_weights(Arguments& arguments, Product& product) {
  product.packed = arguments.array<char>("packed", -1, false);
  const std::int64_t bytes = arguments.length();
  product.format = format_of(arguments);
  product.out_features = arguments.integer("out_features", 1);
  product.in_features = arguments.integer("in_features", 1);
  require_groups(arguments, product.format, product.in_features);
  arguments.require(
      bytes == packed_bytes(product.format, product.out_features, product.in_features),
      "packed has not the size of such weights");
}

// multiply(out, x, bias, packed, format, out_features, in_features)
PyObject* multiply(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments arguments("multiply", values, given, 7);
  Product product = {};
  product.out = arguments.array<float>("out", -1, true);
  const std::int64_t out_bytes = arguments.length();
  product.x = arguments.array<float>("x", -1, false);
  const std::int64_t x_bytes = arguments.length();
  product.bias = arguments.array<float>("bias", -1, false, true);
  const std::int64_t bias_bytes = arguments.length();
  read_weights(arguments, product);
  product.rows = out_bytes / (4 * product.out_features);
  arguments.require(out_bytes % (4 * product.out_features) == 0, "out has no whole rows");
  arguments.require(x_bytes == times({4, product.rows, product.in_features}),
                    "x has not the size of out's rows and in_features");
  arguments.require(product.bias == nullptr || bias_bytes == 4 * product.out_features,
                    "bias has not the size of out_features");
  return without_lock(arguments, [&] { kernels().multiply(product); });
}

// gather(out, ids, packed, format, out_features, in_features)
PyObject* gather(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments arguments("gather", values, given, 6);
  Product product = {};
  product.out = arguments.array<float>("out", -1, true);
  const std::int64_t out_bytes = arguments.length();
  const auto* ids = arguments.array<std::int32_t>("ids", -1, false);
  product.rows = arguments.length() / 4;
  read_weights(arguments, product);
  arguments.require(out_bytes == times({4, product.rows, product.in_features}),
                    "out has not the size of ids and in_features");
  for (std::int64_t i = 0; arguments.ok() && i < product.rows; ++i) {
    arguments.require(0 <= ids[i] && ids[i] < product.out_features, "ids has one that is no row");
  }
  return without_lock(arguments, [&] { kernels().gather(product, ids); });
}

// pack(packed, rows, stored, format, out_features, in_features)
PyObject* pack_weights(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments arguments("pack", values, given, 6);
  auto* packed = arguments.array<char>("packed", -1, true);
  const std::int64_t bytes = arguments.length();
  const auto* rows = arguments.array<char>("rows", -1, false);
  const std::int64_t row_bytes = arguments.length();
  const std::int64_t number = arguments.integer("stored", 0);
  arguments.require(number <= 4, "stored is none of 0 to 4");
  const auto stored = static_cast<Stored>(number);
  const Format format = format_of(arguments);
  const std::int64_t out_features = arguments.integer("out_features", 1);
  const std::int64_t in_features = arguments.integer("in_features", 1);
  require_groups(arguments, format, in_features);
  arguments.require(arguments.ok() && can_pack(stored, format),
                    "rows that are stored so cannot be packed so");
  arguments.require(arguments.ok() && row_bytes == out_features * bytes_per_row(stored, in_features),
                    "rows has not the size of such rows");
  arguments.require(arguments.ok() && bytes == packed_bytes(format, out_features, in_features),
                    "packed has not the size of such weights");
  return without_lock(arguments, [&] {
    pack(packed, format, rows, stored, out_features, in_features);
  });
}

// packed_bytes(format, out_features, in_features)
PyObject* packed_bytes_of(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments arguments("packed_bytes", values, given, 3);
  const Format format = format_of(arguments);
  const std::int64_t out_features = arguments.integer("out_features", 1);
  const std::int64_t in_features = arguments.integer("in_features", 1);
  require_groups(arguments, format, in_features);
  if (!arguments.ok()) return nullptr;
  return PyLong_FromLongLong(packed_bytes(format, out_features, in_features));
}

// rms_norm(out, residual, x or None, weight, eps)
PyObject* rms_norm(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments arguments("rms_norm", values, given, 5);
  auto* out = arguments.array<float>("out", -1, true);
  const std::int64_t bytes = arguments.length();
  const bool adds = given == 5 && values[2] != Py_None;
  auto* residual = arguments.array<float>("residual", bytes, adds);
  const auto* x = arguments.array<float>("x", -1, false, true);
  arguments.require(x == nullptr || arguments.length() == bytes, "x has not the size of out");
  const auto* weight = arguments.array<float>("weight", -1, false);
  const std::int64_t columns = arguments.length() / 4;
  const float eps = arguments.real();
  arguments.require(columns > 0 && bytes % (4 * columns) == 0, "out has no whole rows of weight");
  return without_lock(arguments, [&] {
    kernels().rms_norm(out, residual, x, weight, eps, bytes / (4 * columns), columns);
  });
}

// silu_mul(out, gate_up, columns)
PyObject* silu_mul(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments arguments("silu_mul", values, given, 3);
  auto* out = arguments.array<float>("out", -1, true);
  const std::int64_t bytes = arguments.length();
  const auto* gate_up = arguments.array<float>("gate_up", 2 * bytes, false);
  const std::int64_t columns = arguments.integer("columns", 1);
  arguments.require(bytes % (4 * columns) == 0, "out has no whole rows");
  return without_lock(
      arguments, [&] { kernels().silu_mul(out, gate_up, bytes / (4 * columns), columns); });
}

// The last arguments of both: k, v, kv_heads, block_size, k_dim, v_dim, query_heads
Pages pages_of(Arguments& arguments, std::int64_t* query_heads, std::int64_t* num_blocks) {
  Pages pages = {};
  pages.k = arguments.array<float>("k", -1, true);
  const std::int64_t k_bytes = arguments.length();
  pages.v = arguments.array<float>("v", -1, true);
  const std::int64_t v_bytes = arguments.length();
  pages.kv_heads = arguments.integer("kv_heads", 1);
  pages.block_size = arguments.integer("block_size", 1);
  pages.k_dim = arguments.integer("k_dim", 2, kLargestHead);
  pages.v_dim = arguments.integer("v_dim", 1, kLargestHead);
  *query_heads = arguments.integer("query_heads", 1);
  const std::int64_t rows = pages.kv_heads * pages.block_size;
  const std::int64_t block_bytes = times({4, rows, pages.k_dim});
  *num_blocks = k_bytes / block_bytes;
  arguments.require(k_bytes % block_bytes == 0, "k has no whole blocks");
  arguments.require(v_bytes == times({4, *num_blocks, rows, pages.v_dim}),
                    "v has not the blocks of k");
  arguments.require(pages.k_dim % 2 == 0, "k_dim must be even");
  arguments.require(*query_heads % pages.kv_heads == 0,
                    "query_heads must be a multiple of kv_heads");
  return pages;
}

std::int64_t width_of(const Pages& pages, std::int64_t query_heads) {
  return (query_heads + pages.kv_heads) * pages.k_dim + pages.kv_heads * pages.v_dim;
}

// rotate_and_keep(qkv, positions, table, slots, k, v, kv_heads, block_size, k_dim, v_dim, query_heads)
PyObject* rotate_and_keep(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments arguments("rotate_and_keep", values, given, 11);
  Rotation args = {};
  args.qkv = arguments.array<float>("qkv", -1, true);
  const std::int64_t bytes = arguments.length();
  args.positions = arguments.array<std::int32_t>("positions", -1, false);
  args.tokens = arguments.length() / 4;
  args.table = arguments.array<float>("table", -1, false);
  const std::int64_t table_bytes = arguments.length();
  args.slots = arguments.array<std::int64_t>("slots", 8 * args.tokens, false);
  std::int64_t num_blocks = 0;
  args.pages = pages_of(arguments, &args.query_heads, &num_blocks);
  args.table_rows = table_bytes / (4 * args.pages.k_dim);
  arguments.require(bytes == times({4, args.tokens, width_of(args.pages, args.query_heads)}),
                    "qkv has not the size of positions and heads");
  for (std::int64_t i = 0; arguments.ok() && i < args.tokens; ++i) {
    arguments.require(0 <= args.positions[i] && args.positions[i] < args.table_rows,
                      "positions has one that is not in the table");
    arguments.require(args.slots[i] < num_blocks * args.pages.block_size,
                      "slots has one that is in no block");
  }
  return without_lock(arguments, [&] { kernels().rotate_and_keep(args); });
}

// attend(out, qkv, positions, block_table, tasks, sequences, scale,
//        k, v, kv_heads, block_size, k_dim, v_dim, query_heads)
PyObject* attend(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments arguments("attend", values, given, 14);
  Attention args = {};
  args.out = arguments.array<float>("out", -1, true);
  const std::int64_t out_bytes = arguments.length();
  args.qkv = arguments.array<float>("qkv", -1, false);
  const std::int64_t bytes = arguments.length();
  args.positions = arguments.array<std::int32_t>("positions", -1, false);
  const std::int64_t tokens = arguments.length() / 4;
  args.block_table = arguments.array<std::int32_t>("block_table", -1, false);
  const std::int64_t table_size = arguments.length() / 4;
  args.tasks = arguments.array<std::int32_t>("tasks", -1, false);
  args.num_tasks = arguments.length() / 12;
  const std::int64_t sequences = arguments.integer("sequences", 1);
  args.scale = arguments.real();
  std::int64_t num_blocks = 0;
  args.pages = pages_of(arguments, &args.query_heads, &num_blocks);
  args.columns = table_size / sequences;
  arguments.require(table_size == sequences * args.columns, "block_table has no whole rows");
  arguments.require(bytes == times({4, tokens, width_of(args.pages, args.query_heads)}),
                    "qkv has not the size of positions and heads");
  arguments.require(out_bytes == times({4, tokens, args.query_heads, args.pages.v_dim}),
                    "out has not the size of positions and heads");
  for (std::int64_t i = 0; arguments.ok() && i < args.num_tasks; ++i) {
    const std::int64_t sequence = args.tasks[3 * i], first = args.tasks[3 * i + 1];
    const std::int64_t end = first + args.tasks[3 * i + 2];
    arguments.require(0 <= sequence && sequence < sequences && 0 <= first && first < end &&
                          end <= tokens,
                      "tasks has one that is not in the step");
    arguments.require((end - first) * (args.query_heads / args.pages.kv_heads) <= kMostQueries,
                      "tasks has one of more than 1024 queries");
    if (!arguments.ok()) break;
    const std::int64_t last = args.positions[end - 1];
    const std::int64_t blocks = last / args.pages.block_size + 1;
    arguments.require(last >= 0, "positions has a negative one");
    arguments.require(blocks <= args.columns, "block_table is too narrow");
    for (std::int64_t j = 0; arguments.ok() && j < blocks; ++j) {
      const std::int64_t block = args.block_table[sequence * args.columns + j];
      arguments.require(0 <= block && block < num_blocks, "block_table has what is no block");
    }
  }
  return without_lock(arguments, [&] { kernels().attend(args); });
}

PyObject* set_threads(PyObject*, PyObject* const* values, Py_ssize_t given) {
  Arguments arguments("set_threads", values, given, 1);
  const auto count = static_cast<int>(arguments.integer("count", 1, 1024));
  bool are_there = true;
  PyObject* done = without_lock(arguments, [&] { are_there = pool::set_threads(count); });
  if (are_there) return done;
  Py_XDECREF(done);
  return PyErr_Format(PyExc_RuntimeError, "set_threads: the system has no %d threads to give", count);
}

PyObject* num_threads(PyObject*, PyObject*) { return PyLong_FromLong(pool::num_threads()); }

PyObject* instructions(PyObject*, PyObject*) { return PyUnicode_FromString(kernels().name); }

PyObject* all_instructions(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const Kernels* some : kAllKernels) {
    if (names == nullptr || !some->is_supported()) continue;
    PyObject* name = PyUnicode_FromString(some->name);
    if (name == nullptr || PyList_Append(names, name) < 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

PyObject* use_instructions(PyObject*, PyObject* name) {
  Py_ssize_t size = 0;
  const char* wanted = PyUnicode_AsUTF8AndSize(name, &size);
  if (wanted == nullptr) return nullptr;
  for (const Kernels* some : kAllKernels) {
    if (std::strcmp(some->name, wanted) == 0 && some->is_supported()) {
      chosen = some;
      Py_RETURN_NONE;
    }
  }
  return PyErr_Format(PyExc_ValueError, "use_instructions: this processor has no %R", name);
}

template <PyObject* (*FUNCTION)(PyObject*, PyObject* const*, Py_ssize_t)>
PyCFunction as_method() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(FUNCTION));
}

PyMethodDef methods[] = {
    {"multiply", as_method<multiply>(), METH_FASTCALL, nullptr},
    {"gather", as_method<gather>(), METH_FASTCALL, nullptr},
    {"pack", as_method<pack_weights>(), METH_FASTCALL, nullptr},
    {"packed_bytes", as_method<packed_bytes_of>(), METH_FASTCALL, nullptr},
    {"rms_norm", as_method<rms_norm>(), METH_FASTCALL, nullptr},
    {"silu_mul", as_method<silu_mul>(), METH_FASTCALL, nullptr},
    {"rotate_and_keep", as_method<rotate_and_keep>(), METH_FASTCALL, nullptr},
    {"attend", as_method<attend>(), METH_FASTCALL, nullptr},
    {"set_threads", as_method<set_threads>(), METH_FASTCALL, nullptr},
    {"num_threads", num_threads, METH_NOARGS, nullptr},
    {"instructions", instructions, METH_NOARGS, nullptr},
    {"all_instructions", all_instructions, METH_NOARGS, nullptr},
    {"use_instructions", use_instructions, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Kernels of the cpu device.", -1, methods,
    nullptr,               nullptr,   nullptr,                      nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  for (const Kernels* some : kAllKernels) {
    if (some->is_supported()) {
      chosen = some;
      break;
    }
  }
  return PyModule_Create(&definition);
}
