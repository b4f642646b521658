// Calls from Python with little overhead: call(address, number, ...) puts the numbers into an array and calls the
// function there with it. ctypes does the same, several microseconds slower; it is used where Python.h is missing.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

static const Py_ssize_t MOST_FIELDS = 64;

static PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    int64_t fields[MOST_FIELDS];
    if (count < 1 || count > MOST_FIELDS + 1) {
        PyErr_Format(PyExc_TypeError, "call takes an address and at most %zd numbers", MOST_FIELDS);
        return nullptr;
    }
    for (Py_ssize_t index = 0; index < count; ++index) {
        const long long value = PyLong_AsLongLong(arguments[index]);
        if (value == -1 && PyErr_Occurred()) return nullptr;
        if (index > 0) fields[index - 1] = value;
    }
    typedef int64_t (*Function)(const int64_t*);
    const Function function = reinterpret_cast<Function>(uintptr_t(PyLong_AsLongLong(arguments[0])));
    int64_t result;
    Py_BEGIN_ALLOW_THREADS
    result = function(fields);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(result);
}

static PyMethodDef methods[] = {
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL,
     "call(address, number, ...): call the kernel at `address` with its fields."},
    {nullptr, nullptr, 0, nullptr}};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "rmsrepro_kernels", nullptr, -1, methods,
                             nullptr,               nullptr,            nullptr, nullptr};

PyMODINIT_FUNC PyInit_rmsrepro_kernels() { return PyModule_Create(&module); }
