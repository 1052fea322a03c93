"""Watch: whether a model's objects are still those that were read."""

cimport cython
from cpython.dict cimport PyDict_GetItemWithError, PyDict_Next, PyDict_Size
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport Py_EQ, PyObject, PyObject_RichCompareBool
from cpython.array cimport array

from array import array as new_array

import torch

cdef extern from *:
    """
    #define MC_LINE 64

    static void mc_touch(const void *at) { __builtin_prefetch(at); }

    /* Ask for what lookups read: a header, indices, entries. Nothing of it need be there. */
    static void mc_touch_table(PyObject *one)
    {
        const PyDictObject *dict = (const PyDictObject *)one;
        const char *keys = (const char *)dict->ma_keys, *values = (const char *)dict->ma_values;
        Py_ssize_t num = dict->ma_used < 48 ? dict->ma_used : 48;
        for (Py_ssize_t at = 0; at < 32 + 28 * num; at += MC_LINE) __builtin_prefetch(keys + at);
        if (values)
            for (Py_ssize_t at = 0; at < 8 * num; at += MC_LINE) __builtin_prefetch(values + at);
    }
    """
    enum:
        MC_LINE
    void mc_touch(const void *at) noexcept nogil
    void mc_touch_table(PyObject *one) noexcept nogil


cdef object _NOTHING = object()


@cython.final
cdef class Watch:
    """Objects in dictionaries, and tensors, to see whether they are as they were.

    Between two tokens all of a model's weights are read, so what is looked at has left the
    processor's caches: all of it is asked for at once, and then looked at.
    """

    # Lists beside each other: of each entry its dictionary, its name, and what it held.
    cdef list _holders, _names, _held
    # Of dictionaries whose entries all stay, in their order: what they held, one after the other.
    cdef list _whole, _members
    cdef list _values_in, _value_names, _values
    cdef list _tensors, _counted, _versions
    cdef array _addresses
    # Whatever is looked at, once: dictionaries, and addresses of what tensors consist of.
    cdef dict _all
    cdef list _dicts
    cdef array _lines

    def __cinit__(self):
        self._holders, self._names, self._held = [], [], []
        self._whole, self._members = [], []
        self._values_in, self._value_names, self._values = [], [], []
        self._tensors, self._counted, self._versions = [], [], []
        self._addresses, self._lines = new_array("Q"), new_array("Q")
        self._all, self._dicts = {}, []

    def holds(self, holder not None, str name not None, held):
        """Expect an entry to be one object; `None`: it is that, or there is none."""
        self.touches(holder)
        self._holders.append(holder)
        self._names.append(name)
        self._held.append(held)

    def lacks(self, holder not None, str name not None):
        """Expect that there is no such entry."""
        self.holds(holder, name, _NOTHING)

    def keeps(self, holder not None):
        """Expect all entries to be the objects that they are, in the same order."""
        self.touches(holder)
        self._whole.append(holder)
        self._members.extend(holder.values())

    def equals(self, holder not None, str name not None, value):
        """Expect an entry to be equal to a value."""
        self.touches(holder)
        self._values_in.append(holder)
        self._value_names.append(name)
        self._values.append(value)

    def lies(self, tensor):
        """Expect a tensor to be where it is."""
        self._tensors.append(tensor)
        self._addresses.append(tensor.data_ptr())
        # Python's object, torch's own, and that of its memory.
        self._lines.extend([id(tensor), tensor._cdata, tensor._cdata + MC_LINE])
        self._lines.append(tensor.untyped_storage()._cdata)

    def stays(self, tensor):
        """Expect a tensor's values to be as they are."""
        self._counted.append(tensor)
        self._versions.append(tensor._version)

    def touches(self, holder not None):
        """Have a dictionary asked for with the others; the caller looks at it."""
        if not isinstance(holder, dict):
            raise TypeError(f"{type(holder).__name__} is no dictionary")
        self._all[id(holder)] = holder

    def are_current(self):
        """Return whether all of it is as it was."""
        self._touch()
        cdef Py_ssize_t i, place, member = 0
        cdef PyObject *found
        cdef PyObject *held
        cdef PyObject *name
        for i in range(PyList_GET_SIZE(self._holders)):
            found = PyDict_GetItemWithError(
                <object>PyList_GET_ITEM(self._holders, i), <object>PyList_GET_ITEM(self._names, i)
            )
            held = PyList_GET_ITEM(self._held, i)
            if found != held and (
                found != NULL or (held != <PyObject *>None and held != <PyObject *>_NOTHING)
            ):
                return False
        for i in range(PyList_GET_SIZE(self._whole)):
            place = 0
            while PyDict_Next(
                <object>PyList_GET_ITEM(self._whole, i), &place, &name, &found
            ):
                if member >= PyList_GET_SIZE(self._members) or (
                    found != PyList_GET_ITEM(self._members, member)
                ):
                    return False
                member += 1
        if member != PyList_GET_SIZE(self._members):
            return False
        address = torch.Tensor.data_ptr
        for i in range(PyList_GET_SIZE(self._tensors)):
            if <unsigned long long>address(self._tensors[i]) != (
                self._addresses.data.as_ulonglongs[i]
            ):
                return False
        for i in range(PyList_GET_SIZE(self._counted)):
            if self._counted[i]._version != self._versions[i]:
                return False
        for i in range(PyList_GET_SIZE(self._values_in)):
            found = PyDict_GetItemWithError(
                <object>PyList_GET_ITEM(self._values_in, i),
                <object>PyList_GET_ITEM(self._value_names, i)
            )
            if found == NULL or not PyObject_RichCompareBool(
                <object>found, self._values[i], Py_EQ
            ):
                return False
        return True

    cdef int _touch(self) except -1:
        """Ask for every line that is looked at."""
        cdef Py_ssize_t i
        if PyList_GET_SIZE(self._dicts) != len(self._all):
            self._dicts = list(self._all.values())
        for i in range(PyList_GET_SIZE(self._dicts)):
            mc_touch(PyList_GET_ITEM(self._dicts, i))
        for i in range(len(self._lines)):
            mc_touch(<const void *><size_t>self._lines.data.as_ulonglongs[i])
        for i in range(PyList_GET_SIZE(self._dicts)):
            mc_touch_table(PyList_GET_ITEM(self._dicts, i))
        return 0


def num_entries(list dicts not None):
    """Return how many entries some dictionaries have together."""
    cdef Py_ssize_t i, found = 0
    for i in range(PyList_GET_SIZE(dicts)):
        found += PyDict_Size(<object>PyList_GET_ITEM(dicts, i))
    return found
