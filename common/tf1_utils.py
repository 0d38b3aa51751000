"""What the TF1 scripts share: one compiled graph per update, Adam, MPI, tf1_save/, checkpoints."""

import os
import shutil

import numpy as np
import tensorflow.compat.v1 as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework.variable_pb2 import VariableDef
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from common import mpi
from common.errors import SidespinError, flag
from common.mpi import broadcast, num_procs, proc_id
from common.run import KEPT_MODELS, MODELS
from common.weights import orthogonal_layers


def make_session(threads=1):
    """Start a session with this many threads, and with rank 0's initial values on all ranks."""
    sess = tf.Session(
        config=tf.ConfigProto(
            intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads
        )
    )
    tf.get_variable("mpi/turn", initializer=0.0, trainable=False)  # see mpi_avg
    sess.run(tf.global_variables_initializer())
    for variable in tf.trainable_variables():
        value = np.array(sess.run(variable))  # a scalar would be read-only
        broadcast(value)
        load(variable, value, sess)
    return sess


def load(variable, value, sess):
    """Overwrite a variable with an array."""
    sess.run(variable.initializer, {variable.initializer.inputs[1]: value})


def init_orthogonal(params, last_gain, rng, sess):
    """Overwrite the weights of an MLP [w, b, w, b, ...] with orthogonal ones, its biases with 0."""
    if [p.shape.rank for p in params] != [2, 1] * (len(params) // 2):
        raise SidespinError(
            f"{flag('ortho')} needs layers with one weight matrix and one bias each"
        )
    weights = orthogonal_layers([w.shape.as_list() for w in params[::2]], last_gain, rng)
    for w, b, value in zip(params[::2], params[1::2], weights):
        broadcast(value)
        load(w, value, sess)
        load(b, np.zeros(b.shape, np.float32), sess)


def compiled(update):
    """Turn a function into one graph: Python loops and conditions on tensors become TensorFlow's.

    XLA compiles it unless there are several ranks, because XLA cannot call MPI.
    """
    return tf.function(update, jit_compile=True if num_procs() == 1 else None)


def compiled_loop(update, *batches):
    """Call update on each batch [n, B, ...] in turn, all in one graph; stack what it returns."""
    step = compiled(update)
    slices = [tf.TensorSpec(x.shape[1:], x.dtype) for x in batches]
    outputs = step.get_concrete_function(*slices).structured_outputs
    outputs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), outputs)

    def loop(*batches):
        one_by_one = dict(fn_output_signature=outputs, parallel_iterations=1)
        return tf.map_fn(lambda batch: step(*batch), batches, **one_by_one)

    return compiled(loop)(*batches)


@tf.autograph.experimental.do_not_convert
def mpi_avg(x):
    """Average a tensor over all ranks, inside the graph."""
    if num_procs() == 1:
        return x
    # TensorFlow orders operations by the variables they touch, and runs others in any order. Ranks
    # must agree on the order of their averages, so all of them read and write one variable.
    with tf.variable_scope("mpi", reuse=True):
        turn = tf.get_variable("turn", [])

    def average(x, turn):
        return np.asarray(mpi.mpi_avg(x), x.dtype), turn

    mean, after = tf.numpy_function(average, [x, turn.read_value()], [x.dtype, turn.dtype])
    turn.assign(tf.ensure_shape(after, []))
    return tf.ensure_shape(mean, x.shape)


def flat_concat(xs):
    """Join tensors into one flat vector."""
    return tf.concat([tf.reshape(x, [-1]) for x in xs], axis=0)


def split_flat(x, params):
    """Split the flat vector x into tensors shaped like params."""
    parts = tf.split(x, [p.shape.num_elements() for p in params])
    return [tf.reshape(part, p.shape) for p, part in zip(params, parts)]


class MpiAdamOptimizer:
    """Adam with the gradient averaged over all ranks, in one Allreduce of one flat vector.

    The formula is torch's, which adds epsilon after the bias correction of the second moment.
    TensorFlow's own AdamOptimizer adds it before: it then weighs 30 times more at the first step.
    """

    def __init__(self, params, learning_rate=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-8):
        self.params, self.learning_rate, self.epsilon = params, learning_rate, epsilon
        # Rounded to float32 as in the kernel: that changes 1 - 0.999 by one part in 1e5, and the
        # bias correction has to match.
        self.beta1, self.beta2 = float(np.float32(beta1)), float(np.float32(beta2))
        self.t = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.ms = [tf.Variable(tf.zeros(p.shape), trainable=False) for p in params]
        self.vs = [tf.Variable(tf.zeros(p.shape), trainable=False) for p in params]

    @tf.autograph.experimental.do_not_convert
    def minimize(self, loss):
        """Take one step; in a compiled function, later operations see the new parameters."""
        grads = tf.gradients(loss, self.params, unconnected_gradients="zero")
        if num_procs() > 1:
            grads = split_flat(mpi_avg(flat_concat(grads)), self.params)
        t = tf.cast(self.t.assign_add(1), tf.float64)  # float32 has too few digits for 1 - 0.999^t
        # The kernel computes p -= alpha m / (sqrt(v) + eps) in one pass. Scaling alpha and
        # eps by the square root of v's bias correction makes it torch's formula; beta powers of 0
        # switch off the kernel's own correction.
        correction = tf.sqrt(1 - self.beta2**t)
        alpha = tf.cast(self.learning_rate, tf.float64) / (1 - self.beta1**t) * correction
        eps = tf.cast(self.epsilon * correction, tf.float32)
        for p, m, v, grad in zip(self.params, self.ms, self.vs, grads):
            tf.raw_ops.ResourceApplyAdam(
                var=p.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=0.0,
                beta2_power=0.0,
                lr=tf.cast(alpha, tf.float32),
                beta1=self.beta1,
                beta2=self.beta2,
                epsilon=eps,
                grad=grad,
            )


class Normalizer:
    """The running mean and standard deviation of numbers, over all ranks; at first 0 and 1."""

    def __init__(self, name, *shape):
        zeros, ones = np.zeros(shape, np.float32), np.ones(shape, np.float32)
        self.mean = tf.get_variable(f"{name}_mean", initializer=zeros)
        self.std = tf.get_variable(f"{name}_std", initializer=ones)
        self.batches = tf.get_variable(f"{name}_batches", initializer=0.0)
        self.state = [self.mean, self.std, self.batches]

    def __call__(self, x):
        return (x - self.mean) / self.std

    @tf.autograph.experimental.do_not_convert
    def update(self, x):
        """Count one more batch [B, ...], of the same size on all ranks and in every epoch."""
        x = tf.cast(x, tf.float64)
        mean = mpi_avg(tf.reduce_mean(x, 0))
        var = mpi_avg(tf.reduce_mean((x - mean) ** 2, 0))
        share = 1 / tf.cast(self.batches.assign_add(1.0), tf.float64)
        moved = mean - tf.cast(self.mean, tf.float64)
        changed = tf.cast(tf.not_equal(self.std, 1), tf.float64)
        before = changed * tf.cast(self.std, tf.float64) ** 2
        mean = self.mean.assign_add(tf.cast(share * moved, tf.float32))
        std = tf.sqrt((1 - share) * (before + share * moved**2) + share * var)
        std = tf.cast(std, tf.float32)
        # A number that has never changed keeps its std of 1: anything small would make its first
        # change huge. To tell them apart, any other std of exactly 1 becomes the next float.
        std = tf.where_v2(tf.equal(std, 1), 1 + 2**-23, std)
        self.std.assign(tf.where_v2(std <= 1e-6 * tf.abs(mean) + 1e-8, 1.0, std))


class State:
    """All variables of a session's graph, including Adam's, for a checkpoint."""

    def __init__(self, sess):
        self.sess = sess

    def _variables(self):
        variables = self.sess.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        return {variable.op.name: variable for variable in variables}

    def get_state(self):
        return self.sess.run(self._variables())

    def set_state(self, arrays):
        variables = self._variables()
        if set(variables) != set(arrays):
            raise ValueError("other variables")
        for name, variable in variables.items():
            load(variable, arrays[name], self.sess)


class Model:
    """What tf1_save/ holds: the variables, and the graph with its tensors x, a, pi, v, ..."""

    def __init__(self, sess, inputs, outputs):
        # Built once: other ways to save a model add operations to the graph on every save.
        self.sess, self.saver = sess, tf.train.Saver(tf.trainable_variables())
        graph = tf.train.export_meta_graph(saver_def=self.saver.as_saver_def(), clear_devices=True)
        graph.meta_info_def.tags.append(tf.saved_model.tag_constants.SERVING)
        signature = graph.signature_def["serving_default"]
        signature.method_name = tf.saved_model.signature_constants.PREDICT_METHOD_NAME
        for infos, tensors in (signature.inputs, inputs), (signature.outputs, outputs):
            for key, x in tensors.items():
                infos[key].name, infos[key].dtype = x.name, x.dtype.as_datatype_enum
                infos[key].tensor_shape.CopyFrom(x.shape.as_proto())
        saved_model = SavedModel(saved_model_schema_version=1, meta_graphs=[graph])
        self.graph = saved_model.SerializeToString()


def save_model(run, model, epoch):
    """Write a SavedModel to tf1_save/; with --keep-models, also keep one per save.

    A reader of tf1_save/ finds a complete model, old or new, or none.
    """
    if proc_id() > 0:
        return
    path = run.folder / MODELS["tf1"]
    new, old = (path.with_name(f"{path.name}.{state}") for state in ("new", "old"))
    with run.writing():
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            (new / "variables").mkdir(parents=True)
            (new / "saved_model.pb").write_bytes(model.graph)
            variables = str(new / "variables" / "variables")
            model.saver.save(model.sess, variables, write_meta_graph=False, write_state=False)
        except BaseException as error:
            shutil.rmtree(new, ignore_errors=True)
            if isinstance(error, tf.errors.OpError | ValueError):  # how the saver fails
                raise OSError(0, str(error).splitlines()[0]) from error
            raise
        if run.args.keep_models:
            kept = run.folder / KEPT_MODELS["tf1"].format(epoch)
            shutil.copytree(new, kept, dirs_exist_ok=True)
        if path.exists():
            os.replace(path, old)
        os.replace(new, path)
        shutil.rmtree(old, ignore_errors=True)


def load_model(path):
    """Return the variables of a tf1_save/ by name, in the order in which they were created."""
    try:
        graph = SavedModel.FromString((path / "saved_model.pb").read_bytes()).meta_graphs[0]
        variables = graph.collection_def["trainable_variables"].bytes_list.value
        names = [VariableDef.FromString(x).variable_name.split(":")[0] for x in variables]
        reader = tf.train.load_checkpoint(str(path / "variables" / "variables"))
        return {name: reader.get_tensor(name) for name in names}
    except (OSError, DecodeError, IndexError, ValueError, tf.errors.OpError) as error:
        what = f": {error.strerror}" if isinstance(error, OSError) else " as a saved model"
        raise SidespinError(f"cannot read {path}{what}") from error


def restore_tf_graph(sess, folder):
    """Load tf1_save/ into the session; return its inputs and outputs by name: x, a, pi, v, ..."""
    graph = tf.saved_model.loader.load(sess, [tf.saved_model.tag_constants.SERVING], str(folder))
    signature = graph.signature_def["serving_default"]
    tensors = {**signature.inputs, **signature.outputs}
    return {key: sess.graph.get_tensor_by_name(t.name) for key, t in tensors.items()}
