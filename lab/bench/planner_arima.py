"""Forecast with ARIMA, for the reference's planner: the next value of a series of equal intervals."""

import statistics
import warnings
from collections import deque
from collections.abc import Sequence

import numpy as np

FIT_SAMPLES = 96  # the latest, to which the model is fitted
MIN_FIT = 16  # samples; below: their average
REFIT_EVERY = 16  # samples between two searches for the parameters
AVERAGE_SAMPLES = 4


class ArimaForecaster:
    """Forecast one series with ARIMA(1, 1, 1). Its parameters are searched from time to time."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=FIT_SAMPLES)
        self._parameters: Sequence[float] | None = None
        self._age = 0

    def add(self, value: float) -> None:
        """Add one interval. Intervals before the first request are left out."""
        if self._samples or value:
            self._samples.append(value)

    def next(self) -> float | None:
        """Return the forecast of the next interval; None if there is no sample."""
        samples = list(self._samples)
        if not samples:
            return None
        fitted = None if len(samples) < MIN_FIT or max(samples) == min(samples) else self._fitted(samples)
        value = statistics.fmean(samples[-AVERAGE_SAMPLES:]) if fitted is None else fitted
        return min(max(value, 0.0), 2 * max(samples))

    def _fitted(self, samples: Sequence[float]) -> float | None:
        try:
            from statsmodels.tsa.arima.model import ARIMA
        except ImportError:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a search that did not converge
                model = ARIMA(np.asarray(samples), order=(1, 1, 1))
                if self._parameters is None or self._age >= REFIT_EVERY:
                    fitted = model.fit(method_kwargs={"maxiter": 50})
                    self._parameters, self._age = fitted.params, 0
                else:
                    self._age += 1
                    fitted = model.filter(self._parameters)
                value = float(fitted.forecast(1)[0])
        except (ValueError, ArithmeticError, IndexError, np.linalg.LinAlgError):
            return None
        return value if np.isfinite(value) else None
