"""Foresight: the guesses about each layer, compared with its router's choices."""

cimport cython
cimport numpy as cnp
from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free

import numpy as np

from moecache.cache._cache cimport ExpertCache
from moecache.policies._ids cimport as_ids, id_at

cnp.import_array()

# The belief in a class that has not been seen weighs as much as this many guesses.
cdef double PRIOR_TRIALS = 8
# A guess that is right more often than not: a step will take a slot for it, if nothing else does.
cdef double LIKELY = 0.5
# When a class has seen this many guesses, they count half from then on.
cdef double MAX_TRIALS = 1024


@cython.final
cdef class Foresight:
    """Count how good predictions are, and pick the guesses that are worth a read ahead.

    A score says little by itself: the resident experts are those that were used lately, so
    missing experts are used less often than their scores say. How often guesses of missing
    experts are right is counted here, by classes of scores; for predictions without scores,
    by place.

    Parameters
    ----------
    cache : ExpertCache
        Says which experts are there, or on their way.

    Attributes
    ----------
    num_used : int
        Experts that tokens used at layers that were predicted.
    num_predicted_k, num_found_k : int
        Among as many guesses as the token used experts: all of them, and those that were right.
    num_predicted_2k, num_found_2k : int
        The same among twice as many guesses.
    """

    def __cinit__(self, ExpertCache cache not None):
        cdef Py_ssize_t num_places = <Py_ssize_t>cache.num_layers * MAX_GUESSES
        self.cache = cache
        self.guesses = <int32_t*>calloc(num_places, sizeof(int32_t))
        self.classes = <uint8_t*>calloc(num_places, sizeof(uint8_t))
        self.absent = <uint8_t*>calloc(num_places, sizeof(uint8_t))
        self.num_guesses = <int*>calloc(cache.num_layers, sizeof(int))
        self.used = <uint64_t*>calloc(cache.num_experts, sizeof(uint64_t))
        if (
            self.guesses == NULL or self.classes == NULL or self.absent == NULL
            or self.num_guesses == NULL or self.used == NULL
        ):
            raise MemoryError(f"no memory for the predictions of {cache.num_layers} layers")

    def __dealloc__(self):
        free(self.guesses)
        free(self.classes)
        free(self.absent)
        free(self.num_guesses)
        free(self.used)

    def expect(
        self, Py_ssize_t layer, ids, scores=None, *, double min_likelihood=0.0
    ) -> tuple | None:
        """Note a prediction for a layer, instead of an earlier one; return the experts to fetch.

        Parameters
        ----------
        layer : int
        ids : ndarray of int32 or int64, shape [n]
            The likeliest first. Ids out of range, repeated ones, and those beyond the 128th,
            are dropped.
        scores : ndarray of float, shape [n], optional
            Probabilities of use; more than 1 counts as 1.
        min_likelihood : float, default 0.0
            Leave out guesses of a class that was right less often than this.

        Returns
        -------
        (ndarray of int32, shape [m], int), or None
            Those that are neither resident nor on their way, and likely enough, and how many of
            them are more likely than not: these come first. A class's likelihood is how often its
            guesses were right, where its score counts as eight of them. `None` if there are none.

        Raises
        ------
        ValueError
            If the layer is out of range, there are not as many scores as ids, or a score is no
            number.
        """
        cdef cnp.ndarray array = as_ids(ids)
        cdef bint wide = cnp.PyArray_ITEMSIZE(array) == 8
        cdef const void* data = cnp.PyArray_DATA(array)
        cdef Py_ssize_t i, n = cnp.PyArray_SIZE(array)
        cdef Py_ssize_t base = layer * MAX_GUESSES
        cdef bint scored = scores is not None
        cdef const float[::1] values = None
        cdef int count = 0, wanted = 0, likely = 0, number
        cdef int64_t expert, key
        cdef double chance
        cdef int32_t[MAX_GUESSES] chosen
        cdef int32_t[MAX_GUESSES] others
        self.cache.checked(layer, 0)
        if scored:
            values = np.ascontiguousarray(scores, np.float32).reshape(-1)
            if values.shape[0] != n:
                raise ValueError(f"{n} ids have {values.shape[0]} scores")
            for i in range(n):
                if not isfinite(values[i]) or values[i] < 0:
                    raise ValueError(f"score {values[i]} is no probability")
        self.call += 1
        for i in range(n):
            expert = id_at(data, wide, i)
            if expert < 0 or expert >= self.cache.num_experts or count == MAX_GUESSES:
                continue
            if self.used[expert] == self.call:
                continue
            self.used[expert] = self.call
            if scored:
                number = <int>(min(values[i], <float>1.0) * (NUM_CLASSES - 1))
            else:
                number = min(count, NUM_CLASSES - 1)
            key = layer * self.cache.num_experts + expert
            self.guesses[base + count] = <int32_t>expert
            self.classes[base + count] = <uint8_t>number
            self.absent[base + count] = not self.cache.is_resident_or_coming(<int>key)
            if self.absent[base + count]:
                chance = self.likelihood(number, scored)
                if chance >= min_likelihood and chance > LIKELY:
                    chosen[likely] = <int32_t>expert
                    likely += 1
                elif chance >= min_likelihood:
                    others[wanted] = <int32_t>expert
                    wanted += 1
            count += 1
        self.num_guesses[layer] = count
        if likely + wanted == 0:
            return None
        found = np.empty(likely + wanted, np.int32)
        for i in range(likely + wanted):
            (<int32_t*>cnp.PyArray_DATA(<cnp.ndarray>found))[i] = (
                chosen[i] if i < likely else others[i - likely]
            )
        return found, likely

    def score(self, Py_ssize_t layer, ids) -> None:
        """Compare what one token uses at a layer with what was foreseen, and forget the latter.

        Parameters
        ----------
        layer : int
        ids : ndarray of int32 or int64, any shape
            Ids out of range are dropped.
        """
        cdef cnp.ndarray array = as_ids(ids)
        cdef bint wide = cnp.PyArray_ITEMSIZE(array) == 8
        cdef const void* data = cnp.PyArray_DATA(array)
        cdef Py_ssize_t i, base = layer * MAX_GUESSES
        cdef int64_t expert
        cdef int k = 0, count, number
        cdef bint right
        self.cache.checked(layer, 0)
        count = self.num_guesses[layer]
        if count == 0:
            return
        self.num_guesses[layer] = 0
        self.call += 1
        for i in range(cnp.PyArray_SIZE(array)):
            expert = id_at(data, wide, i)
            if 0 <= expert < self.cache.num_experts and self.used[expert] != self.call:
                self.used[expert] = self.call
                k += 1
        self.num_used += k
        self.num_predicted_k += min(k, count)
        self.num_predicted_2k += min(2 * k, count)
        for i in range(count):
            right = self.used[self.guesses[base + i]] == self.call
            self.num_found_k += right and i < k
            self.num_found_2k += right and i < 2 * k
            if self.absent[base + i]:
                number = self.classes[base + i]
                if self.trials[number] >= MAX_TRIALS:
                    self.trials[number] /= 2
                    self.successes[number] /= 2
                self.trials[number] += 1
                self.successes[number] += right

    def drop(self, Py_ssize_t layer) -> None:
        """Forget the guess about a layer: the next step cannot be compared with it."""
        self.cache.checked(layer, 0)
        self.num_guesses[layer] = 0

    cdef double likelihood(self, int number, bint scored) noexcept:
        cdef double prior = <double>number / (NUM_CLASSES - 1) if scored else 0.5
        return (
            (self.successes[number] + PRIOR_TRIALS * prior)
            / (self.trials[number] + PRIOR_TRIALS)
        )
