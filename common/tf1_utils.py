"""What the TF1 scripts share: MPI on parameters and gradients, Adam, tf1_save/, checkpoints."""

import os
import shutil

import numpy as np
import tensorflow.compat.v1 as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework.variable_pb2 import VariableDef
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from common.mpi import Stopped, broadcast, fail, mpi_avg, num_procs, proc_id, writing

tf.disable_eager_execution()
tf.logging.set_verbosity(tf.logging.ERROR)  # else every call of TF1's is reported as deprecated


def make_session(threads=1):
    """Start a session of so many threads a rank, with all variables initialised."""
    sess = tf.Session(
        config=tf.ConfigProto(
            intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads
        )
    )
    sess.run(tf.global_variables_initializer())
    return sess


def flat_concat(xs):
    """Join tensors into one flat vector."""
    return tf.concat([tf.reshape(x, [-1]) for x in xs], axis=0)


def split_flat(x, params):
    """Cut the flat vector x into pieces of the shapes of the params."""
    parts = tf.split(x, [p.shape.num_elements() for p in params])
    return [tf.reshape(part, p.shape) for p, part in zip(params, parts)]


def assign_params_from_flat(x, params):
    """Return an op that cuts the flat vector x into the params."""
    return tf.group([p.assign(part) for p, part in zip(params, split_flat(x, params))])


def sync_params(params):
    """Return an op that overwrites the params on every rank by rank 0's."""

    def from_rank_0(x):
        x = np.array(x)
        broadcast(x)
        return x

    flat = tf.numpy_function(from_rank_0, [flat_concat(params)], tf.float32)
    return assign_params_from_flat(flat, params)


def sync_all_params():
    """Return an op that overwrites all trainable variables on every rank by rank 0's."""
    return sync_params(tf.trainable_variables())


class MpiAdamOptimizer:
    """Adam, its gradient averaged over all ranks in one Allreduce of one flat vector.

    The formula is torch's: epsilon is added after the bias correction of the second moment, where
    TensorFlow's own AdamOptimizer adds it before, which weighs 30 times more at the first step.
    """

    def __init__(self, learning_rate=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-8):
        self.learning_rate, self.epsilon = learning_rate, epsilon
        # As the kernel has them: 1 - 0.999 in float32 is 1e-5 off, and so would be its correction.
        self.beta1, self.beta2 = float(np.float32(beta1)), float(np.float32(beta2))

    def minimize(self, loss, params):
        """Return an op that takes one step on the params."""
        grads = tf.gradients(loss, params)
        if num_procs() > 1:
            flat = flat_concat(grads)
            mean = tf.numpy_function(mpi_avg, [flat], tf.float32)
            grads = split_flat(tf.ensure_shape(mean, flat.shape), params)
        with tf.control_dependencies(None):  # a state does not wait for what comes before a step
            t = tf.Variable(0, dtype=tf.int64, trainable=False)
            ms = [tf.Variable(tf.zeros(p.shape), trainable=False) for p in params]
            vs = [tf.Variable(tf.zeros(p.shape), trainable=False) for p in params]
        t = tf.cast(t.assign_add(1), tf.float64)  # float32 has too few digits for 1 - 0.999^t
        # The kernel computes p -= alpha m / (sqrt(v) + eps) in one pass. With alpha and eps times
        # the root of v's correction that is torch's formula; beta powers of 0 are no correction.
        correction = tf.sqrt(1 - self.beta2**t)
        alpha = tf.cast(self.learning_rate / (1 - self.beta1**t) * correction, tf.float32)
        eps = tf.cast(self.epsilon * correction, tf.float32)
        steps = [
            tf.raw_ops.ResourceApplyAdam(
                var=p.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=0.0,
                beta2_power=0.0,
                lr=alpha,
                beta1=self.beta1,
                beta2=self.beta2,
                epsilon=eps,
                grad=grad,
            )
            for p, m, v, grad in zip(params, ms, vs, grads)
        ]
        return tf.group(steps)


class Model:
    """The graph and the variables that tf1_save/ holds, under names: x, a, pi, v, ..."""

    def __init__(self, sess, inputs, outputs):
        # Once: every other way to save a model adds operations to the graph each time.
        self.sess, self.saver = sess, tf.train.Saver(tf.trainable_variables())
        graph = tf.train.export_meta_graph(saver_def=self.saver.as_saver_def(), clear_devices=True)
        graph.meta_info_def.tags.append(tf.saved_model.tag_constants.SERVING)
        signature = tf.saved_model.predict_signature_def(inputs, outputs)
        graph.signature_def["serving_default"].CopyFrom(signature)
        saved_model = SavedModel(saved_model_schema_version=1, meta_graphs=[graph])
        self.graph = saved_model.SerializeToString()
        self.variables = {v.op.name: v for v in tf.global_variables()}

    def get_state(self):
        """Return all variables, Adam's among them, as arrays by name, for a checkpoint."""
        return self.sess.run(self.variables)

    def set_state(self, arrays):
        """Overwrite all variables by those of a checkpoint."""
        for name, variable in self.variables.items():
            variable.load(arrays[name], self.sess)


def save_model(folder, model, itr=None):
    """Write a SavedModel to tf1_save/, with itr also to tf1_save_<itr>/.

    A reader of tf1_save/ finds a whole one, old or new, or none.
    """
    if proc_id() == 0:
        with writing(folder):
            new, old = folder / "tf1_save.new", folder / "tf1_save.old"
            for leftover in (new, old):
                shutil.rmtree(leftover, ignore_errors=True)
            try:
                new.mkdir()
                (new / "variables").mkdir()
                (new / "saved_model.pb").write_bytes(model.graph)
                path = str(new / "variables" / "variables")
                model.saver.save(model.sess, path, write_meta_graph=False, write_state=False)
            except BaseException as error:
                shutil.rmtree(new, ignore_errors=True)
                if isinstance(error, tf.errors.OpError | ValueError):  # how its saver fails
                    problem = str(error).splitlines()[0]
                    raise Stopped(f"cannot write to {new}: {problem}") from error
                raise
            if itr is not None:
                shutil.copytree(new, folder / f"tf1_save_{itr}", dirs_exist_ok=True)
            if (folder / "tf1_save").exists():
                os.replace(folder / "tf1_save", old)
            os.replace(new, folder / "tf1_save")
            shutil.rmtree(old, ignore_errors=True)


def load_model(path):
    """Return the variables of a tf1_save/ by name, in the order in which they were made."""
    try:
        graph = SavedModel.FromString((path / "saved_model.pb").read_bytes()).meta_graphs[0]
        variables = graph.collection_def["trainable_variables"].bytes_list.value
        names = [VariableDef.FromString(x).variable_name.split(":")[0] for x in variables]
        reader = tf.train.load_checkpoint(str(path / "variables" / "variables"))
        return {name: reader.get_tensor(name) for name in names}
    except (OSError, DecodeError, IndexError, ValueError, tf.errors.OpError) as error:
        what = f": {error.strerror}" if isinstance(error, OSError) else " as a saved model"
        fail(f"cannot read {path}{what}")


def restore_tf_graph(sess, folder):
    """Load tf1_save/ into the session; return its inputs and outputs by name: x, a, pi, v, ..."""
    graph = tf.saved_model.loader.load(sess, [tf.saved_model.tag_constants.SERVING], str(folder))
    signature = graph.signature_def["serving_default"]
    tensors = {**signature.inputs, **signature.outputs}
    return {key: sess.graph.get_tensor_by_name(t.name) for key, t in tensors.items()}
