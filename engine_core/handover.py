"""From one core to the next: an executor with another pool needs another core."""

from triptych.engine_core.errors import RequestError
from triptych.engine_core.outputs import OutputColumns
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import StepOutput


def take_over(core: Scheduler, before: Scheduler) -> StepOutput:
    """`core` goes on with what `before` has not ended, which is used no more. What does not fit
    ends with the error of `submit`."""
    columns = OutputColumns(0)
    for request in before.resumable():
        choices = request.choices()
        live = [each for each in choices if before.lives(each)]
        try:
            core.submit(request)
        except RequestError as error:
            for request_id in live:
                columns.fail(request_id, error)
        else:
            for request_id in set(choices).difference(live):
                core.abort(request_id)
    return columns.output()
